"""The text of a failed run: what, and where in the author's own file."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.unit.agents.world import experience
from trinity_mq.experience import Experience
from trinity_mq.messages.tasks import MOST_ANSWER, MOST_ANSWERS, MOST_TRUTH
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, EngineNotReady, EngineRefused, PromptTooLong
from trinity_mq.rewards import RewardError, UnknownNameError
from trinity_mq.rollout.failures import MAX_ERROR, describe, failure_key, failure_of, kind_of, reward_fault
from trinity_mq.rollout.run_results import RunResults, answer_texts
from trinity_mq.rollout.status import RunFailure, SliceOutcome
from trinity_mq.workflows import RunFailedError, SandboxFailed, Task, TaskError, Workflow
from trinity_mq.workflows.auxiliary import AuxiliaryError

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
    group = ExceptionGroup("unhandled errors in a TaskGroup", [raised(own_bug)])
    assert describe(group, Own).startswith("KeyError: 'my own bug' ("), "that of its task"


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


def sandbox_away() -> None:
    try:
        raise ConnectionRefusedError(111, "refused")
    except OSError as error:
        raise SandboxFailed("no answer from\n10.0.0.3") from error


def test_a_sandbox_says_its_kind_and_where_it_was_asked() -> None:
    failure = failure_of(raised(sandbox_away), Own)
    place = f"{HERE}:{line_of(sandbox_away) + 4}"
    assert failure == RunFailure(failure.message, "sandbox", True)
    assert failure.message.startswith("sandbox: no answer from 10.0.0.3 (")
    assert failure.message.endswith(f"{place})")
    assert failure_key(failure.message).startswith("sandbox ")


def refused_by_client(code: str) -> openai.BadRequestError:
    response = httpx2.Response(400, request=httpx2.Request("POST", "http://engine/v1/chat/completions"))
    return openai.BadRequestError("refused", response=response, body={"code": code})


def caused(cause: BaseException) -> BaseException:
    """Return an error of a framework that was raised from ``cause``."""
    error = ValueError("the agent failed")
    error.__cause__ = cause
    return error


LOST = AuxiliaryError("the judge cannot be asked")
LOST.lost = InferenceModel(id="judge", url="http://127.0.0.1:9", name="judge")


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (SandboxFailed("x"), "sandbox", True),
        (SandboxFailed("x", kind="tool"), "tool", True),
        (SandboxFailed("x", kind="environment", retryable=False), "environment", False),
        (RunFailedError("x"), "workflow", True),
        (RunFailedError("x", kind="my_cluster_7", retryable=False), "my_cluster_7", False),
        (caused(SandboxFailed("x", kind="provider")), "provider", True),
        (caused(RunFailedError("x", retryable=False)), "workflow", False),
        (ExceptionGroup("", [SandboxFailed("x", retryable=False)]), "sandbox", False),
        (ExceptionGroup("", [RewardError("x")]), "task", False),
        (KeyError("answer"), "workflow", True),
        (TimeoutError("x"), "timeout", True),
        (ConnectionRefusedError(111, "refused"), "environment", True),
        (caused(ConnectionResetError(104, "reset")), "environment", True),
        (socket.gaierror(-2, "no such name"), "environment", True),
        (FileNotFoundError(2, "docker"), "workflow", True),
        (EngineLost("x"), "engine", True),
        (caused(EngineNotReady("x")), "engine", True),
        (EngineRefused("x", 400), "engine", False),
        (PromptTooLong("x", [1], 1), "task", False),
        (caused(refused_by_client("context_length_exceeded")), "task", False),
        (refused_by_client("invalid_text"), "workflow", True),
        (TaskError("x"), "task", False),
        (UnknownNameError("x"), "task", False),
        (LOST, "provider", True),
        (AuxiliaryError("what it answered cannot be used"), "workflow", True),
    ],
    ids=repr,
)
def test_each_exception_has_a_kind_and_a_class(error: Exception, kind: str, retryable: bool) -> None:
    failure = failure_of(error, Own)
    assert (failure.kind, failure.retryable) == (kind, retryable)


def test_an_error_raised_from_itself_has_an_end() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert kind_of(error) == "workflow"


@pytest.mark.parametrize("kind", ["", "Sand box", "sandbox/7", "9", "x" * 33, 7, "sandbox\n"])
def test_a_kind_is_a_short_name(kind) -> None:
    with pytest.raises(ValueError, match=r"SandboxFailed\(kind=.*at most 32 characters.*It was: no answer"):
        SandboxFailed("no answer", kind=kind)


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


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"answer": "seven"}, "seven"),
        ({"answer": 18}, "18"),
        ({"answer": 0}, "0"),
        ({"answer": False}, "false"),
        ({"answer": ["a", {"b": 1}]}, '["a", {"b": 1}]'),
        ({"answer": None}, None),
        ({"answer": ""}, None),
        ({}, None),
        ({"answer": "\ud83d"}, "?"),
        ({"answer": "x" * 5000 + "end"}, "x" * 249 + "…" + "x" * 747 + "end"),
    ],
)
def test_each_sample_carries_the_expected_answer(record: dict[str, Any], wanted: str | None) -> None:
    results = RunResults()
    results.finished(Task(raw_task=record), 3, [experience(1, 3), experience(1, 3)], 1.0)
    found = [one.info.get("truth") for one in results.experiences[3]]
    assert found == [wanted, wanted]
    entry = experience(1, 0, info={"truth": "mine"})
    RunResults().finished(Task(raw_task=record), 0, [entry], 1.0)
    assert entry.info["truth"] == "mine", "a workflow's own one is kept"
    assert wanted is None or len(wanted) <= MOST_TRUTH


def test_the_reward_of_a_run_is_that_of_its_last_step() -> None:
    """Of several experiences with the same step, the last one counts, as in training."""
    results = RunResults()
    results.finished(Task(), 0, [experience(1, 0, reward=reward) for reward in (0.0, 1.0)], 1.0)
    assert results.metrics[0]["reward"] == 1.0


def test_the_answer_of_a_run_is_what_its_last_step_said() -> None:
    said = [experience(1, run) for run in (0, 0, 1, 2)]
    for one, step, text in zip(said, (1, 0, 0, 0), ("last", "first", None, None), strict=True):
        one.eid.step, one.response_text = step, text
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "in messages"}]
    said[2].messages = [*talk, {"role": "tool", "content": "5"}]
    assert answer_texts(SliceOutcome(experiences=said, runs=[0, 1, 2])) == ["last", "in messages", ""]


def test_answers_are_bounded() -> None:
    said = [experience(1, run) for run in range(MOST_ANSWERS + 5)]
    for one in said:
        one.response_text = "thoughts " * 1000 + "the answer is 7"
    found = answer_texts(SliceOutcome(experiences=said, runs=list(range(len(said)))))
    assert [len(text) for text in found] == [MOST_ANSWER] * MOST_ANSWERS
    assert all(text.endswith("the answer is 7") for text in found)
