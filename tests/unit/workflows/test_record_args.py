"""Arguments that the record of a task from outside may give."""

from __future__ import annotations

import pytest
from pydantic import Field

from trinity_mq.messages import TaskBody
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.workflow import Task, TaskError


class Play(Arguments):
    seed: int = 0
    env_args: dict[str, str] = Field(default_factory=dict)


def arguments(record_args: list[str] | None) -> Play:
    record = {"question": "x", "seed": 3, "env_args": {"path": "/"}}
    body = TaskBody(workflow="math_workflow", raw_task=record, record_args=record_args)
    return arguments_of(Task.from_body(body), Play, record_keys=["seed", "env_args"])


def test_a_task_of_the_taskset_gives_all() -> None:
    assert arguments(None) == Play(seed=3, env_args={"path": "/"})


def test_a_task_from_outside_gives_those_that_are_open() -> None:
    with pytest.raises(TaskError, match=r"raw_task\.env_args .* outsiders\.record_args"):
        arguments(["seed"])
    assert arguments(["seed", "env_args"]).seed == 3


def test_it_stays_so_on_the_way_through_a_runner() -> None:
    task = Task.from_body(TaskBody(workflow="math_workflow", record_args=["seed"]))
    assert task.copy_for_run().to_body().record_args == ["seed"]
