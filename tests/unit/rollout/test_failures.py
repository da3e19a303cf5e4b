"""The text of a failed run: what, and where in the author's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_mq.experience import Experience
from trinity_mq.rollout.failures import MAX_ERROR, describe, failure_key, reward_fault
from trinity_mq.workflows import RunFailedError, Workflow

HERE = Path(__file__).name


class Own(Workflow):
    def run(self) -> list[Experience]:
        return []


def raised(function, *arguments) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any of them
        function(*arguments)
    return caught.value


def line_of(function) -> int:
    return int(function.__code__.co_firstlineno)


def own_bug() -> None:
    raise KeyError("my own bug")


def test_the_place_is_the_authors_line_and_not_the_librarys() -> None:
    def parse() -> None:
        json.loads("{")

    text = describe(raised(parse), Own)
    assert text.startswith("JSONDecodeError: Expecting property name")
    assert f"{HERE}:{line_of(parse) + 1}, raised in decoder.py:" in text
    assert describe(raised(own_bug), Own).endswith(f"{HERE}:{line_of(own_bug) + 1})")


def test_an_exception_of_a_task_group_is_that_of_its_task() -> None:
    group = ExceptionGroup("unhandled errors in a TaskGroup", [raised(own_bug)])
    assert describe(group, Own).startswith("KeyError: 'my own bug' (")


def test_a_run_that_gave_nothing_names_the_line_of_its_method() -> None:
    text = describe(RunFailedError("Own returned None, wanted a list of experiences"), Own)
    assert text.startswith("Own returned None, wanted a list of experiences (")
    assert text.endswith(f"{HERE}:{line_of(Own.run)})")


def test_a_long_text_keeps_its_place() -> None:
    def says_too_much() -> None:
        raise ValueError("prompt " * 10_000)

    text = describe(raised(says_too_much), Own)
    assert len(text) < MAX_ERROR + 200
    assert text.endswith(f"{HERE}:{line_of(says_too_much) + 1})")


def test_failures_of_one_place_are_of_one_kind() -> None:
    assert failure_key("KeyError: 'a' (x.py:7)") == failure_key("KeyError: 'b (c)' (x.py:7)")
    assert failure_key("KeyError: 'a' (x.py:7)") != failure_key("KeyError: 'a' (x.py:8)")
    assert failure_key("KeyError: 'a' (x.py:7)") != failure_key("ValueError: 'a' (x.py:7)")
    assert failure_key("not done within the 5 s of the slice") == failure_key("not done within the 6 s of the slice")


def one(reward: float | None, step: int = 0) -> Experience:
    experience = Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[0.0, 0.0], reward=reward)
    experience.eid.step = step
    return experience


@pytest.mark.parametrize(
    ("rewards", "needed", "fault"),
    [
        ([0.5], True, None),
        ([None], False, None),
        ([None, 1.0], True, None),
        ([1.0, None], True, "Own returned no reward; set experience.reward to a number ("),
        ([float("nan")], False, "Own returned the reward nan, wanted a finite number ("),
        ([float("inf"), 1.0], True, "Own returned the reward inf, wanted a finite number ("),
    ],
)
def test_the_last_step_has_a_finite_reward(rewards, needed, fault) -> None:
    found = reward_fault(Own, [one(reward, step) for step, reward in enumerate(rewards)], needed=needed)
    assert (found or "").startswith(fault or "")
    assert (found is None) == (fault is None)
    assert found is None or f"{HERE}:{line_of(Own.run)})" in found
