"""Makes experiences of a session's calls, with their rewards. Nothing is tokenised again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trinity_mq.config.modes.gateway import Merge
from trinity_mq.experience import Experience
from trinity_mq.gateway.recorded_call import Answers
from trinity_mq.messages import SessionCall
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import experiences_of

CAUSES = ("new", "template", "retoken", "temperature")
"""Reasons why the prompt of a call does not continue an earlier one."""


def superseded_calls(calls: Sequence[SessionCall]) -> set[str]:
    """Return the calls whose answer their client did not get and had made again.

    A gateway names the call that a repeat replaces as far as it knows that call. The answer of another gateway may
    reach the stream later than the repeat. So a repeat that names no call replaces one equal call that began before
    the repeat was answered, was sent fewer times, and is no sibling of the repeat: the call that was sent most often.

    Args:
        calls: All calls of a session, in the order of the stream.
    """
    superseded = {call.supersedes for call in calls if call.supersedes}
    for repeat in calls:
        if not repeat.retry or not repeat.digest or repeat.supersedes:
            continue
        equal = [
            call
            for call in calls
            if call.digest == repeat.digest
            and call.retry < repeat.retry
            and 0.0 < call.began <= repeat.at
            and call.call not in superseded
            and call.call not in repeat.siblings
            and repeat.call not in call.siblings
        ]
        if equal:
            superseded.add(max(equal, key=lambda call: call.retry).call)
    return superseded


def session_experiences(
    calls: Sequence[SessionCall],
    *,
    reward: float | None,
    call_rewards: Mapping[tuple[str, int | None], float],
    merge: Merge,
    turn_discount: float,
) -> list[Experience]:
    """Return the experiences of one session, in the order of its calls, each with a reward.

    An answer without a reward of its own has that of the next one times ``turn_discount``, the last one that of the
    session. Left out are answers behind the last reward, calls that their client repeated, and, of several answers to
    one request, those that the conversation did not go on with. A turn that is merged into the next one shares its
    reward.

    Args:
        calls: In their order.
        reward: Of the whole session.
        call_rewards: By call and choice; None for all choices.
        merge: How turns become experiences.
        turn_discount: From 0 to 1.

    Raises:
        ValueError: A call continues one that is missing.
    """
    superseded = superseded_calls(calls)
    kept = [call for call in calls if call.call not in superseded]
    continued = {(call.continues, call.choice) for call in kept if call.continues}
    continued_calls = {name for name, _ in continued}
    answers = Answers(list(calls))
    found: list[tuple[SessionCall, int, Experience]] = []
    for call in kept:
        for number, experience in enumerate(experiences_of(answers.answer(call), call.temperature)):
            if call.call not in continued_calls or (call.call, number) in continued:
                found.append((call, number, experience))
    rewarded: list[Experience] = []
    following = reward
    for call, number, experience in reversed(found):
        own = call_rewards.get((call.call, number), call_rewards.get((call.call, None)))
        worth = following if own is None else own
        if worth is None:
            continue
        experience.reward = worth
        if number == 0 or call.call in continued_calls:  # the answers to one request stand beside each other
            following = worth * turn_discount
        rewarded.append(experience)
    rewarded.reverse()
    if merge != "per_call":
        rewarded = merge_turns(rewarded)
    return rewarded


def session_metrics(calls: Sequence[SessionCall], experiences: int) -> dict[str, float]:
    """Return numbers about a session: its calls, the experiences made of them, and breaks of prefixes by cause."""
    causes = Counter(call.break_cause for call in calls if call.break_cause)
    return {
        "session_calls": float(len(calls)),
        "session_experiences": float(experiences),
        **{f"session_breaks_{cause}": float(causes[cause]) for cause in CAUSES},
    }
