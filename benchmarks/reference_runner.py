"""The runner and the workflow of scheduler_on_ray.py; a module of its own, for Ray's workers import it."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from trinity.common.experience import EID, Experience
from trinity.common.workflows import Workflow
from trinity.explorer import workflow_runner

PROMPT = 16


class NoModel:
    """A model that nobody asks."""

    @property
    async def model_version_async(self) -> int:
        """The version."""
        return 0

    async def prepare(self) -> None:
        """Do nothing."""

    async def clean_workflow_state(self) -> None:
        """Do nothing."""

    async def get_workflow_state(self) -> dict[str, Any]:
        """Return no state."""
        return {}


class NoModels:
    """Stands for what finds the actors of models."""

    def __init__(self, *_: object) -> None:
        pass

    def get_model(self, *_: object) -> NoModel:
        """Return a model that nobody asks."""
        return NoModel()


class IdleRunner(workflow_runner.WorkflowRunner):  # type: ignore[misc]
    """A runner without a model."""

    def __init__(self, *arguments: object) -> None:
        workflow_runner.Allocator = NoModels
        super().__init__(*arguments)


class NoopWorkflow(Workflow):  # type: ignore[misc]
    """A workflow that does the same as ``trinity_mq.testing.noop.NoopWorkflow``."""

    is_async = True
    can_repeat = True

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Take the runs."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    async def run_async(self) -> list[Experience]:
        """Return one experience for each run, after the seconds of the task."""
        if seconds := self.task.workflow_args["seconds"]:
            await asyncio.sleep(seconds)
        count = self.task.workflow_args["tokens"]
        tokens, logprobs = torch.arange(count, dtype=torch.int32), torch.full((count - PROMPT,), -0.5)
        return [
            Experience(
                eid=EID(run=self.run_id_base + run),
                tokens=tokens,
                prompt_length=PROMPT,
                logprobs=logprobs,
                reward=1.0,
                metrics={"reward": 1.0},
            )
            for run in range(self.repeat_times)
        ]
