"""A workflow without a model, with which benchmarks measure the cost of the queue alone."""

from __future__ import annotations

import asyncio

import torch

from trinity_mq.experience import EID, Experience
from trinity_mq.workflows import Workflow

TOKENS = 64
PROMPT = 16


class NoopWorkflow(Workflow):
    """Returns one experience for each run after ``workflow_args.seconds`` seconds (default 0).

    An experience has ``workflow_args.tokens`` tokens (default 64). The first 16 tokens are the prompt.
    """

    is_async = True
    can_repeat = True

    async def run_async(self) -> list[Experience]:
        count = int(self.task.workflow_args.get("tokens", TOKENS))
        if seconds := float(self.task.workflow_args.get("seconds", 0.0)):
            await asyncio.sleep(seconds)
        tokens, logprobs = torch.arange(count, dtype=torch.int32), torch.full((count - PROMPT,), -0.5)
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
