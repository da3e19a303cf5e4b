"""A workflow without a model, with which benchmarks measure the cost of the queue alone."""

from __future__ import annotations

import asyncio

import torch
from pydantic import Field

from trinity_mq.experience import EID, Experience
from trinity_mq.workflows import Workflow
from trinity_mq.workflows.arguments import Arguments, arguments_of

PROMPT = 16


class NoopArguments(Arguments):
    """``workflow_args`` of :class:`NoopWorkflow`."""

    seconds: float = Field(default=0.0, ge=0)
    """Duration of a task in seconds."""
    tokens: int = Field(default=64, gt=PROMPT)
    """Number of tokens of an experience. The first 16 tokens are the prompt."""


class NoopWorkflow(Workflow):
    """Returns one experience for each run."""

    arguments_kind = NoopArguments
    is_async = True
    can_repeat = True

    async def run_async(self) -> list[Experience]:
        arguments = arguments_of(self.task, NoopArguments)
        if arguments.seconds:
            await asyncio.sleep(arguments.seconds)
        tokens = torch.arange(arguments.tokens, dtype=torch.int32)
        logprobs = torch.full((arguments.tokens - PROMPT,), -0.5)
        return [
            Experience(
                eid=EID(run=self.run_id_base + run),
                tokens=tokens,
                prompt_length=PROMPT,
                logprobs=logprobs,
                reward=1.0,
            )
            for run in range(self.repeat_times)
        ]
