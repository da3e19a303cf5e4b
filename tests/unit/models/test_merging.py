"""Turns become one experience only where the tokens say that they are one; what is taken from history is taken once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import Experience
from trinity_mq.models.recording.history import ExperienceHistory
from trinity_mq.models.recording.merging import merge_turns


def turn(prompt: list[int], response: list[int], **fields: Any) -> Experience:
    usual = {"versions": [(0, 1, 2)], "temperature": 1.0, "logprobs": [-float(token) for token in response]}
    return Experience(tokens=prompt + response, prompt_length=len(prompt), **{**usual, **fields})


def columns(experience: Experience) -> tuple[list[int], list[bool], list[float]]:
    assert experience.action_mask is not None
    assert experience.logprobs is not None
    return experience.tokens.tolist(), experience.action_mask.tolist(), experience.logprobs.tolist()


def test_three_turns_are_one() -> None:
    turns = [
        turn([1, 2], [3, 4], prompt_text="a", response_text="b"),
        turn([1, 2, 3, 4, 5], [6], versions=[(0, 1, 3)]),
        turn([1, 2, 3, 4, 5, 6], [7, 8], versions=[(0, 1, 3), (1, 1, 4)], response_text="c"),
    ]
    [merged] = merge_turns(turns)
    assert columns(merged) == (
        [1, 2, 3, 4, 5, 6, 7, 8],
        [True, True, False, True, True, True],
        [-3.0, -4.0, 0.0, -6.0, -7.0, -8.0],
    )
    assert merged.versions == [(0, 1, 2), (3, 1, 3), (5, 1, 4)]
    assert (merged.version_min, merged.version_max) == ((1, 2), (1, 4))
    assert (merged.prompt_text, merged.response_text, merged.info) == ("a", "c", {"turns": 3})
    assert merged.eid == turns[0].eid
    assert merged.experience_type == "multi_turn"
    [merged] = merge_turns([turn([1], [2]), turn([1, 2], [3], versions=None)])
    assert merged.versions is None, "what is not known stays unknown"


@pytest.mark.parametrize(
    "second",
    [
        turn([1, 2, 3, 9, 5], [6]),
        turn([1, 2, 3], [6]),
        turn([1, 2, 3, 4, 5], [6], temperature=0.5),
        turn([1, 2, 3, 4, 5], [6], truncate_status="prompt_truncated", logprobs=[0.0]),
        Experience(tokens=[1, 2, 3, 4, 5, 6], prompt_length=5, logprobs=[0.0], action_mask=[True], temperature=1.0),
    ],
    ids=["another token", "shorter", "another temperature", "no response", "merged before"],
)
def test_what_does_not_continue_stays_apart(second: Experience) -> None:
    turns = [turn([1, 2], [3, 4]), second]
    assert merge_turns(turns) == turns


def test_a_branch_is_trained_on_once() -> None:
    first, left, right = turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3], [5])
    merged, branch = merge_turns([first, left, right])
    assert columns(merged)[0] == [1, 2, 3, 4]
    assert branch == right
    later = turn([1, 2, 3, 5, 6], [7])
    merged, branch = merge_turns([first, left, right, later])
    assert columns(branch)[:2] == ([1, 2, 3, 5, 6, 7], [True, False, True])


@given(st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=2), st.booleans()), min_size=1, max_size=8))
def test_whatever_is_merged_each_sampled_token_is_trained_on_once(steps: list[tuple[list[int], bool]]) -> None:
    context, turns = [1], []
    for response, goes_on in steps:
        turns.append(turn(list(context), response))
        context = [*context, *response, 9] if goes_on else [1]
    merged = merge_turns(turns)
    sampled = sorted(token for response, _ in steps for token in response)
    trained = [t for e in merged for t in e.tokens[e.prompt_length :][e.action_mask].tolist()]
    assert sorted(trained) == sampled
    for experience in merged:
        tokens, mask, logprobs = columns(experience)
        response = tokens[experience.prompt_length :]
        assert logprobs == [-float(token) if on else 0.0 for token, on in zip(response, mask, strict=True)]


def test_what_is_coming_is_taken_once() -> None:
    history, come = ExperienceHistory(), [turn([1], [2])]

    def partial() -> list[Experience]:
        return come

    history.expect(partial)
    assert history.take(clear=False) == come
    assert history.take(clear=True) == come
    history.settle(partial)
    assert history.take(clear=True) == []
    history.expect(partial)
    history.settle(partial)
    history.settle(partial)
    assert history.take(clear=True) == come
    history.expect(partial)
    history.settle(partial, keep=False)
    assert history.take(clear=True) == []
