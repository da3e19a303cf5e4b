"""Converts the calls of a session into experiences with rewards. No text is tokenised again.

The answers of a session are a forest: the parent of an answer is the longest earlier answer whose prompt and response
are the first tokens of its prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import fmean

from trinity_mq.config.modes.gateway import Merge, SharedPrefix
from trinity_mq.experience import Experience
from trinity_mq.gateway.lineages import BREAK_CAUSES, lineage_ids, lineages_of, superseded_calls
from trinity_mq.gateway.recorded_call import answer_of
from trinity_mq.messages import SampledChoice, SessionCall
from trinity_mq.models.recording.merging import TokenDigest, TokenPrefixes, join_turns
from trinity_mq.models.recording.responses import experiences_of


def session_experiences(
    calls: Sequence[SessionCall],
    *,
    reward: float | None,
    call_rewards: Mapping[tuple[str, int | None], float],
    merge: Merge,
    turn_discount: float,
    lineage_rewards: Mapping[str, float] | None = None,
    shared_prefix: SharedPrefix = "first",
) -> list[Experience]:
    """Return the experiences of one session, each with a reward, in the order of their last answers.

    With ``r`` for the reward of an answer and ``d`` for ``turn_discount``:

    * An answer with its own reward in ``call_rewards`` has that reward.
    * Any other answer that later answers continue has ``d`` times the reward of the next answer; ``shared_prefix``
      chooses among several next answers.
    * The last answer of a lineage has the reward of its lineage in ``lineage_rewards``. Without such a reward it has
      ``d`` times the reward of the call that follows its tree (:func:`_followers`), else the session's reward.

    Answers are left out if they have no reward or no tokens, or if the client repeated their request. If later calls
    continue some choices of a request, its other choices are left out too, unless ``call_rewards`` names them by index.

    Turns that are merged into one experience share the reward of the last turn.

    Args:
        calls: The calls in their order.
        reward: Reward of the whole session. None: the session has no reward.
        call_rewards: Rewards by (call id, choice index). Index None covers every choice of the call.
        merge: Rule that merges turns into experiences.
        turn_discount: Discount per turn, from 0 to 1.
        lineage_rewards: Rewards by the id of any call of the lineage; see
            :func:`trinity_mq.gateway.lineages.lineages_of`.
        shared_prefix: Credit of answers that several lineages share, as ``gateway.shared_prefix``.

    Raises:
        ValueError: A call continues a call that is missing.
    """
    superseded = superseded_calls(calls)
    answers = _trained_answers(calls, superseded, call_rewards)
    lineages = lineage_ids(calls, superseded)
    rewards_of_lineages = {lineages[call]: value for call, value in (lineage_rewards or {}).items() if call in lineages}
    by_call = {call: rewards_of_lineages[name] for call, name in lineages.items() if name in rewards_of_lineages}
    _set_rewards(answers, reward, call_rewards, by_call, turn_discount, shared_prefix)
    rewarded = [answer for answer in answers if answer.reward is not None]
    return [_experience(turns) for turns in _rows(rewarded, merge, shared_prefix)]


def session_metrics(calls: Sequence[SessionCall], experiences: int) -> dict[str, float]:
    """Return a session's metrics: the numbers of its calls, lineages, experiences, ties and malformed tool calls, and
    the prefix breaks by cause.
    """
    causes = Counter(call.break_cause for call in calls if call.break_cause)
    return {
        "session_calls": float(len(calls)),
        "session_lineages": float(len(lineages_of(calls, superseded_calls(calls)))),
        "session_experiences": float(experiences),
        "session_ties": float(sum(call.tied for call in calls)),
        "session_malformed_calls": float(sum(choice.malformed_calls for call in calls for choice in call.choices)),
        **{f"session_breaks_{cause}": float(causes[cause]) for cause in BREAK_CAUSES},
    }


# -- the forest of a session


@dataclass(slots=True, eq=False)
class _Answer:
    """One sampled answer of a session."""

    call: SessionCall
    number: int
    """Index of the choice."""
    order: int
    """Place of the call among all calls of the session."""
    base: _Answer | None
    """The answer that the call continues according to its record, also if that answer is not trained on."""
    prompt_length: int
    """Number of tokens of the whole prompt."""
    digest: TokenDigest
    """Digest of prompt and response."""
    parent: _Answer | None
    """The longest trained answer whose prompt and response are the first tokens of this answer's prompt."""
    root: SessionCall
    """First call of the tree of this answer."""
    branches: list[_Answer] = field(default_factory=list)
    """Answers with this parent, in their order."""
    is_trained: bool = True
    """False: the client repeated the request, or the model sampled no tokens."""
    reward: float | None = None

    @property
    def choice(self) -> SampledChoice:
        """The sampled tokens."""
        return self.call.choices[self.number]

    def prompt_after(self, start: int) -> list[int]:
        """Return the tokens of the prompt from index ``start``."""
        parts, length, base = [self.call.prompt], len(self.call.prompt), self.base
        while base is not None and length < self.prompt_length - start:
            parts += [base.choice.ids, base.call.prompt]
            length += len(base.choice.ids) + len(base.call.prompt)
            base = base.base
        tokens = list(chain.from_iterable(reversed(parts)))
        return tokens[length - (self.prompt_length - start) :]


def _trained_answers(
    calls: Sequence[SessionCall], superseded: Collection[str], call_rewards: Mapping[tuple[str, int | None], float]
) -> list[_Answer]:
    """Return the answers to train on as a forest, in the order of the session.

    The parent of an answer is usually the answer that its call continues by record. Another gateway may have recorded a
    longer answer that the recording gateway did not know. Therefore all answers are looked up by their tokens.

    Raises:
        ValueError: A call continues a call that is missing.
    """
    by_name: dict[tuple[str, int], _Answer] = {}
    prefixes: TokenPrefixes[_Answer] = TokenPrefixes()
    answers: list[_Answer] = []
    for order, call in enumerate(calls):
        base = by_name.get((call.continues, call.choice)) if call.continues else None
        if call.continues and base is None:
            raise ValueError(f"call {call.call} continues {call.continues}, answer {call.choice}, which does not exist")
        # engines sample greedily at temperature 0 and report the logprobs of temperature 1
        start = TokenDigest.empty(call.temperature or 1.0) if base is None else base.digest
        prompt = start.extended(call.prompt)
        extended = prefixes.longest(start, call.prompt)
        parent = base if base is None or base.is_trained else base.parent
        if extended:  # of answers with equal tokens, an answer without a continuation comes first
            parent = next((answer for answer in extended if not answer.branches), extended[0])
        root = call if parent is None else parent.root
        for number, choice in enumerate(call.choices):
            digest, is_trained = prompt.extended(choice.ids), call.call not in superseded and bool(choice.ids)
            answer = _Answer(call, number, order, base, prompt.length, digest, parent, root, is_trained=is_trained)
            by_name[call.call, number] = answer
            if is_trained:
                answers.append(answer)
                prefixes.add(digest, answer)
                if parent is not None:
                    parent.branches.append(answer)
    continued = {answer.call.call for answer in answers if answer.branches}
    trained = {
        answer: None
        for answer in answers
        if answer.branches or answer.call.call not in continued or (answer.call.call, answer.number) in call_rewards
    }
    for answer in trained:
        answer.branches = [branch for branch in answer.branches if branch in trained]
    return list(trained)


# -- rewards


def _set_rewards(
    answers: Sequence[_Answer],
    reward: float | None,
    call_rewards: Mapping[tuple[str, int | None], float],
    lineage_rewards: Mapping[str, float],
    turn_discount: float,
    shared_prefix: SharedPrefix,
) -> None:
    """Set the rewards of answers, as :func:`session_experiences` describes them."""
    followers = _followers(answers)
    for answer in reversed(answers):
        name = answer.call.call
        named = call_rewards.get((name, answer.number), call_rewards.get((name, None)))
        following = _credit(answer.branches, shared_prefix)
        if named is None and following is None:
            named = lineage_rewards.get(name)
        if named is None and following is None:
            following = _credit(followers.get(answer.root.call, ()), shared_prefix)
        if named is not None:
            answer.reward = named
        else:
            answer.reward = reward if following is None else turn_discount * following


def _credit(answers: Sequence[_Answer], shared_prefix: SharedPrefix) -> float | None:
    """Return the reward that a prefix gets from the ``answers`` that follow it. None: no such answer has a reward."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    if not rewards:
        return None
    return {"first": rewards[0], "last": rewards[-1], "mean": fmean(rewards)}[shared_prefix]


def _followers(answers: Sequence[_Answer]) -> dict[str, list[_Answer]]:
    """Return the answers of the call that follows each tree, by the id of the tree's first call.

    Such a call began after the last answer of the tree. It is the first call that continues an answer from before the
    tree, such as the call of an agent that waited for its sub-agent. Without such a call it is the first call that
    begins another tree, such as the call after a compaction or a prefix break. Trees that run at the same time do not
    follow each other.
    """
    calls: dict[int, list[_Answer]] = {}
    for answer in answers:
        calls.setdefault(answer.order, []).append(answer)
    trees: dict[str, list[_Answer]] = {}
    times: dict[int, float] = {}
    at = 0.0
    for order, (answer, *_) in calls.items():
        # a call without a recorded arrival counts as begun after the answer before it
        times[order], at = answer.call.began or at, answer.call.at
        trees.setdefault(answer.root.call, []).append(answer)
    followers: dict[str, list[_Answer]] = {}
    for root, members in trees.items():
        end, begun = max(member.call.at for member in members), times[members[0].order]
        opened: list[_Answer] = []
        for order, of_call in calls.items():
            if order <= members[-1].order or times[order] < end:
                continue
            if (parent := of_call[0].parent) is None:
                opened = opened or of_call
            elif parent.call.at <= begun:
                followers[root] = of_call
                break
        else:
            followers[root] = opened
    return followers


# -- experiences


def _rows(rewarded: Sequence[_Answer], merge: Merge, shared_prefix: SharedPrefix) -> list[list[_Answer]]:
    """Return the turns of each experience, in the order of their last answers. Each answer is in one row."""
    if merge == "per_call":
        return [[answer] for answer in rewarded]
    continuations: dict[_Answer, _Answer] = {}
    for answer in rewarded:
        branches = [branch for branch in answer.branches if branch.reward is not None]
        if len(branches) == 1 or (branches and shared_prefix != "mean"):
            continuations[answer] = branches[-1 if shared_prefix == "last" else 0]
    continuing = set(continuations.values())
    rows = []
    for answer in rewarded:
        if answer in continuing:
            continue
        row = [answer]
        while (following := continuations.get(row[-1])) is not None:
            row.append(following)
        rows.append(row)
    return sorted(rows, key=lambda row: (row[-1].order, row[-1].number))


def _experience(answers: Sequence[_Answer]) -> Experience:
    first = answers[0]
    turns = [_turn(first, first.prompt_after(0))]
    for earlier, answer in pairwise(answers):
        # the prompt of a later turn begins with the last token of the turn before it
        new = answer.prompt_after(earlier.digest.length)
        turns.append(_turn(answer, [earlier.choice.ids[-1], *new]))
    experience = turns[0] if len(turns) == 1 else join_turns(turns, [1] * (len(turns) - 1))
    experience.reward = answers[-1].reward
    return experience


def _turn(answer: _Answer, prompt: list[int]) -> Experience:
    [experience] = experiences_of(answer_of(answer.call, prompt, answer.number), answer.call.temperature)
    return experience
