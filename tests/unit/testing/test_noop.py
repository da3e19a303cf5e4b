"""The workflow without a model."""

from typing import Any

import pytest

from trinity_mq.testing.noop import NoopWorkflow
from trinity_mq.workflows import Task, TaskError


async def test_an_experience_has_tokens_behind_its_prompt() -> None:
    model: Any = None
    with pytest.raises(TaskError, match=r"workflow_args\.tokens is 16: Input should be greater than 16"):
        await NoopWorkflow(task=Task(workflow=NoopWorkflow, workflow_args={"tokens": 16}), model=model).run_async()
    task = Task(workflow=NoopWorkflow, workflow_args={"tokens": 17, "seconds": 0})
    [experience] = await NoopWorkflow(task=task, model=model).run_async()
    assert (experience.prompt_length, len(experience.tokens)) == (16, 17)
