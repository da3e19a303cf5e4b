"""Converts the calls of a session into experiences with rewards. No text is tokenised again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trinity_mq.config.modes.gateway import Merge
from trinity_mq.experience import Experience
from trinity_mq.gateway.lineages import BREAK_CAUSES, lineages_of, superseded_calls
from trinity_mq.gateway.recorded_call import Answers
from trinity_mq.messages import SessionCall
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import experiences_of


def session_experiences(
    calls: Sequence[SessionCall],
    *,
    reward: float | None,
    call_rewards: Mapping[tuple[str, int | None], float],
    merge: Merge,
    turn_discount: float,
) -> list[Experience]:
    """Return the experiences of one session, in the order of its calls, each with a reward.

    An answer without its own reward gets the reward of the next answer times ``turn_discount``. The last answer gets
    the session's reward. Left out are answers after the last reward, calls that their client repeated, and, of several
    answers to one request, the answers that the conversation did not continue. A turn that is merged into the next turn
    shares its reward.

    Args:
        calls: The calls in their order.
        reward: Reward of the whole session. None: the session has no reward.
        call_rewards: Rewards by (call id, choice index). Index None covers every choice of the call.
        merge: Rule that merges turns into experiences.
        turn_discount: Discount per turn, from 0 to 1.

    Raises:
        ValueError: A call continues a call that is missing.
    """
    superseded = superseded_calls(calls)
    remaining_calls = [call for call in calls if call.call not in superseded]
    continued = {(call.continues, call.choice) for call in remaining_calls if call.continues}
    continued_calls = {name for name, _ in continued}
    answers = Answers(list(calls))
    answer_experiences: list[tuple[SessionCall, int, Experience]] = []
    for call in remaining_calls:
        for number, experience in enumerate(experiences_of(answers.answer(call), call.temperature)):
            if call.call not in continued_calls or (call.call, number) in continued:
                answer_experiences.append((call, number, experience))
    rewarded: list[Experience] = []
    next_reward = reward
    for call, number, experience in reversed(answer_experiences):
        answer_reward = call_rewards.get((call.call, number), call_rewards.get((call.call, None)))
        effective_reward = next_reward if answer_reward is None else answer_reward
        if effective_reward is None:
            continue
        experience.reward = effective_reward
        # several answers to one request are alternatives: they share one discount step
        if number == 0 or call.call in continued_calls:
            next_reward = effective_reward * turn_discount
        rewarded.append(experience)
    rewarded.reverse()
    if merge != "per_call":
        rewarded = merge_turns(rewarded)
    return rewarded


def session_metrics(calls: Sequence[SessionCall], experiences: int) -> dict[str, float]:
    """Return a session's metrics: its numbers of calls, lineages, experiences and ties, and the prefix breaks by
    cause.
    """
    causes = Counter(call.break_cause for call in calls if call.break_cause)
    return {
        "session_calls": float(len(calls)),
        "session_lineages": float(len(lineages_of(calls, superseded_calls(calls)))),
        "session_experiences": float(experiences),
        "session_ties": float(sum(call.tied for call in calls)),
        **{f"session_breaks_{cause}": float(causes[cause]) for cause in BREAK_CAUSES},
    }
