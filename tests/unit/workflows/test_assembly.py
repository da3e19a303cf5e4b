"""From the calls of a session to experiences: which tokens are trained on, and with which reward."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from trinity_mq.experience import Experience
from trinity_mq.messages import SampledChoice, SessionCall
from trinity_mq.workflows.sessions.assembly import session_experiences

R = 0.5
"""Reward of a session in these tests."""


def call(
    name: str, prompt: list[int], *answers: list[int], at: float, continues: str = "", choice: int = 0, **fields: Any
) -> SessionCall:
    """Return a call that began half a second before its answer at ``at``."""
    choices = [
        SampledChoice(
            ids=ids, logprobs=[-float(token) for token in ids], finish_reason="stop", versions=[(0, 1, int(at))]
        )
        for ids in answers
    ]
    where = {"continues": continues, "choice": choice}
    return SessionCall(
        session="s", call=name, at=at, **{"began": at - 0.5, **fields}, prompt=prompt, choices=choices, **where
    )


def assembled(calls: list[SessionCall], *, reward: float | None = R, **options: Any) -> list[Experience]:
    usual: Mapping[str, Any] = {"call_rewards": {}, "merge": "prefix", "turn_discount": 1.0}
    return session_experiences(calls, reward=reward, **{**usual, **options})


def rewards(calls: list[SessionCall], **options: Any) -> dict[int, float]:
    """Return the reward of each experience of its own by its last token."""
    return {int(experience.tokens[-1]): float(experience.reward or 0.0) for experience in assembled(calls, **options)}


def trained(experience: Experience) -> list[int]:
    assert experience.action_mask is not None
    tokens: list[int] = experience.tokens[experience.prompt_length :][experience.action_mask].tolist()
    return tokens


# a parent with two turns, and ten sub-agents between them
SUBS = [call(f"s{number}", [50], [60 + number], at=2.0 + number) for number in range(10)]
PARENT = [call("p1", [1], [2], at=1.0), *SUBS, call("p2", [3], [4], at=20.0, continues="p1")]
BRANCHES = [
    call("a", [1], [2], at=1.0),
    call("b", [3], [4], at=2.0, continues="a"),
    call("c", [3], [5], at=2.1, continues="a", began=1.5),
    call("c2", [6], [7], at=3.1, continues="c"),
]


def test_sub_agents_are_experiences_of_their_own() -> None:
    *subs, parent = assembled(PARENT)
    assert parent.tokens.tolist() == [1, 2, 3, 4]
    assert trained(parent) == [2, 4]
    assert parent.versions == [(0, 1, 1), (2, 1, 20)]
    assert [experience.tokens.tolist() for experience in subs] == [[50, 60 + number] for number in range(10)]


def test_sub_agents_discount_their_caller_once_and_each_other_never() -> None:
    per_call = rewards(PARENT, merge="per_call", turn_discount=0.5)
    assert per_call == {2: R / 2, 4: R, **{60 + number: R / 2 for number in range(10)}}


def test_a_linear_session_is_discounted_call_by_call_also_where_its_prefix_breaks() -> None:
    compacted = [
        call("a", [1], [2], at=1.0),
        call("b", [3], [4], at=2.0, continues="a"),
        call("c", [9], [5], at=3.0),
        call("d", [9], [6], at=4.0, continues="c"),
    ]
    assert rewards(compacted, turn_discount=0.5) == {4: R / 4, 6: R}, "d and c are one experience: b is before c"
    assert rewards(compacted, turn_discount=0.5, merge="per_call") == {2: R / 8, 4: R / 4, 5: R / 2, 6: R}


def test_conversations_at_the_same_time_do_not_discount_each_other() -> None:
    both = [
        call("a", [1], [2], at=1.0),
        call("b", [11], [12], at=1.2, began=0.6),
        call("a2", [3], [4], at=2.0, continues="a"),
        call("b2", [13], [14], at=3.0, continues="b"),
    ]
    assert rewards(both, turn_discount=0.5, merge="per_call") == {2: R / 2, 12: R / 2, 4: R, 14: R}


@pytest.mark.parametrize(
    ("shared_prefix", "tokens", "masks"),
    [
        ("first", [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7]], [[2, 4], [5, 7]]),
        ("last", [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7]], [[4], [2, 5, 7]]),
        ("mean", [[1, 2], [1, 2, 3, 4], [1, 2, 3, 5, 6, 7]], [[2], [4], [5, 7]]),
    ],
)
def test_a_shared_prefix_is_trained_on_once(
    shared_prefix: str, tokens: list[list[int]], masks: list[list[int]]
) -> None:
    experiences = assembled(BRANCHES, shared_prefix=shared_prefix)
    assert [experience.tokens.tolist() for experience in experiences] == tokens
    assert [trained(experience) for experience in experiences] == masks


@pytest.mark.parametrize(("shared_prefix", "of_prefix"), [("first", 0.5), ("last", 0.125), ("mean", 0.3125)])
def test_the_credit_of_a_shared_prefix(shared_prefix: str, of_prefix: float) -> None:
    options: Any = {"shared_prefix": shared_prefix, "turn_discount": 0.5, "merge": "per_call"}
    rewarded = rewards(BRANCHES, lineage_rewards={"b": 1.0, "c": 0.5}, **options)
    assert rewarded == {2: of_prefix, 4: 1.0, 5: 0.25, 7: 0.5}


def test_a_branch_without_a_reward_has_no_say() -> None:
    experiences = assembled(BRANCHES, reward=None, lineage_rewards={"c2": 2.0}, shared_prefix="mean")
    assert [(experience.tokens.tolist(), experience.reward) for experience in experiences] == [
        ([1, 2, 3, 5, 6, 7], 2.0)
    ]


def test_a_call_is_rewarded_before_its_lineage_and_a_lineage_before_the_session() -> None:
    options: Any = {"merge": "per_call", "lineage_rewards": {"s3": 3.0, "p1": 4.0}}
    rewarded = rewards(PARENT, call_rewards={("s3", None): 5.0, ("p1", 0): 6.0}, **options)
    assert rewarded == {2: 6.0, 4: 4.0, 63: 5.0, **{60 + number: 4.0 for number in range(10) if number != 3}}
    assert rewards(PARENT, **options)[63] == 3.0


def test_choices_that_nothing_continues_are_left_out_unless_a_reward_names_them() -> None:
    calls = [call("a", [1], [2], [3], [4], at=1.0), call("b", [5], [6], at=2.0, continues="a", choice=1)]
    assert [experience.tokens.tolist() for experience in assembled(calls)] == [[1, 3, 5, 6]]
    assert rewards(calls, call_rewards={("a", 2): 2.0}) == {4: 2.0, 6: R}
    last = [call("a", [1], [2], at=1.0), call("b", [3], [4], [5], at=2.0, continues="a")]
    assert [trained(experience) for experience in assembled(last)] == [[2, 4], [5]], (
        "alternatives at the end are branches"
    )


def test_a_repeated_answer_in_the_middle_is_context() -> None:
    calls = [
        call("a", [1], [2], at=1.0),
        call("b", [3], [4], at=2.0, continues="a"),
        call("c", [3], [4], at=3.0, continues="a", supersedes="b"),
        call("d", [5], [6], at=4.0, continues="b"),
    ]
    experiences = assembled(calls)
    assert sorted(token for experience in experiences for token in trained(experience)) == [2, 4, 6]
    lonely = [*calls[:2], call("c", [9], [7], at=3.0, continues="a", supersedes="b"), calls[3]]
    experiences = assembled(lonely)
    assert [(experience.tokens.tolist(), trained(experience)) for experience in experiences] == [
        ([1, 2, 9, 7], [2, 7]),
        ([1, 2, 3, 4, 5, 6], [6]),
    ]


def test_an_answer_of_another_gateway_is_found_by_its_tokens() -> None:
    calls = [
        call("a", [1], [2], at=1.0),
        call("b", [3], [4], at=2.0, continues="a"),
        call("c", [3, 4, 5], [6], at=3.0, continues="a"),
        call("d", [1, 2, 3, 4, 5, 6, 7], [8], at=4.0),
    ]
    [whole] = assembled(calls)
    assert (whole.tokens.tolist(), trained(whole)) == ([1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8])


def test_an_answer_without_tokens_is_skipped() -> None:
    calls = [call("a", [1], [2], [], at=1.0), call("b", [3], [4], at=2.0, continues="a", choice=1)]
    assert [experience.tokens.tolist() for experience in assembled(calls)] == [[1, 2], [1, 3, 4]]


def test_a_call_that_continues_a_missing_call_is_an_error() -> None:
    with pytest.raises(ValueError, match="call b continues gone, answer 0, which does not exist"):
        assembled([call("b", [3], [4], at=2.0, continues="gone")])


def test_the_memory_of_a_long_session_grows_with_its_tokens() -> None:
    """Not with the sum of its prompts, which is quadratic in the number of turns."""
    peaks = []
    for size in (200, 800):
        calls = [
            call(f"c{number}", [1] * 40, [2] * 40, at=float(number), continues=f"c{number - 1}" if number else "")
            for number in range(size)
        ]
        tracemalloc.start()
        try:
            [whole] = assembled(calls)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(whole.tokens) == size * 80
    assert peaks[1] < 8 * peaks[0], f"{peaks} bytes for 200 and 800 calls"
