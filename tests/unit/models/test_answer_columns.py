"""An answer's choices made into experiences together are what they are made into one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import Experience, ExperienceError
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.recording.answer_columns import experiences_from_columns
from trinity_mq.models.recording.responses import _experience, experiences_of
from trinity_mq.models.recording.sse import text_of

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
    return experiences_from_columns(answer, temperature, text_of)


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
