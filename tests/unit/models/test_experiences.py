"""Experiences: of an answer's choices together as one by one, of turns, and in history."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import Experience, ExperienceError
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.recording.calls import ExperienceHistory
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import _experience, experiences_from_columns, experiences_of

TOKENS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-9998, 0, width=32) | st.floats(-50, 0)
VERSION = st.tuples(st.integers(0, 9), st.integers(0, 10**6)).map(list)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(TOKENS, min_size=1, max_size=5))
    choice: dict[str, Any] = {
        "message": {"content": draw(st.none() | st.text(max_size=5))},
        "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls", None])),
        "token_ids": ids,
        "token_logprobs": draw(st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids))),
    }
    if draw(st.booleans()):
        choice["weight_versions"] = [[0, *draw(VERSION)]]
    if draw(st.booleans()):
        choice["response_text"] = draw(st.none() | st.text(max_size=5))
    return choice


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "choices": draw(st.lists(choices(), min_size=1, max_size=4)),
        "prompt_token_ids": draw(st.lists(TOKENS, min_size=1, max_size=4)),
        **draw(st.fixed_dictionaries({}, optional={"prompt_text": st.none() | st.text(), "weight_version": VERSION})),
    }


def one_by_one(answer: dict[str, Any], temperature: float) -> list[Experience]:
    return [_experience(choice, answer, temperature) for choice in answer["choices"]]


def together(answer: dict[str, Any], temperature: float = 1.0) -> list[Experience] | None:
    return experiences_from_columns(answer, temperature)


@given(answers(), st.sampled_from([0.0, 0.5, 1, 2.0]))
def test_together_they_are_what_they_are_one_by_one(answer: dict[str, Any], temperature: float) -> None:
    found, wanted = together(answer, temperature), one_by_one(answer, temperature)

    assert found is not None
    for made, reference in zip(found, wanted, strict=True):
        reference.eid.suffix = made.eid.suffix  # random
        assert made == reference
        assert vars(made).keys() == vars(reference).keys()
        assert {name: type(value) for name, value in vars(made).items()} == {
            name: type(value) for name, value in vars(reference).items()
        }
    assert len({made.eid.suffix for made in found}) == len(found)


def answer_of(**changes: Any) -> dict[str, Any]:
    choice = {"text": "ab", "finish_reason": "stop", "token_ids": [3, 4], "token_logprobs": [-0.5, -1.0]}
    return {"choices": [choice, {**choice, **changes}], "prompt_token_ids": [1, 2]}


def outcome(read: Callable[[dict[str, Any], float], list[Experience]], answer: dict[str, Any]) -> Any:
    """Return what ``read`` makes of the answer, or the error that it raises."""
    try:
        made = read(answer, 1.0)
    except (EngineRefused, ExperienceError, TypeError, ValueError, OverflowError) as error:
        return type(error), str(error)
    for experience in made:
        experience.eid.suffix = ""
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"token_logprobs": [-0.5, None]},
        {"token_logprobs": [-0.5, math.nan]},
        {"token_logprobs": [-0.5, -math.inf]},
        {"token_logprobs": [-0.5, -9999.0]},
        {"token_logprobs": [1e39, -0.5]},
        {"prompt_token_ids": [7]},
        {"prompt_text": "x"},
        {"weight_versions": [[0, 1, 2], [1, 1, 3]]},
        *({"token_ids": ids} for ids in (None, [3], [3, 2**31], [3, 0.5], [3, "4"])),
        {"token_ids": [], "token_logprobs": []},
        *({"token_logprobs": logprobs} for logprobs in (None, [-0.5, "-1"])),
        *({"weight_versions": [span]} for span in ([1, 1, 2], [0, -1, 2], [0, 1], [0, "x", 2])),
    ],
)
def test_what_is_unusual_or_wrong_of_a_choice_ends_as_it_does_by_itself(changes: dict[str, Any]) -> None:
    answer = answer_of(**changes)
    assert together(answer) is None
    assert outcome(experiences_of, answer) == outcome(one_by_one, answer)


def test_what_is_written_to_one_experience_is_not_seen_in_another() -> None:
    first, second = experiences_of(answer_of(), 1.0)

    assert first.logprobs is not None
    assert first.action_mask is not None
    first.tokens.fill_(9)
    first.logprobs.fill_(-9)
    first.action_mask.fill_(False)
    first.info["a"], first.metrics["b"] = 1, 1.0

    assert second.tokens.tolist() == [1, 2, 3, 4]
    assert second.logprobs.tolist() == [-0.5, -1.0]
    assert second.action_mask.tolist() == [True, True]
    assert not second.info
    assert not second.metrics
    assert second.versions is None
    assert second.tokens.dtype == torch.int32


# -- turns become one experience only where the tokens say so; what is taken from history is taken once


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
