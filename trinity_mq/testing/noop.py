"""A workflow that asks no model: what is left is what the queue costs."""

from __future__ import annotations

from trinity_mq.experience import EID, Experience
from trinity_mq.workflows import Workflow

TOKENS = 64
PROMPT = 16
RESPONSE = TOKENS - PROMPT


class NoopWorkflow(Workflow):
    """Returns one experience of 64 tokens for each run, at once."""

    is_async = True
    can_repeat = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all runs."""
        return [
            Experience(
                eid=EID(run=self.run_id_base + run),
                tokens=list(range(TOKENS)),
                prompt_length=PROMPT,
                logprobs=[-0.5] * RESPONSE,
                reward=1.0,
            )
            for run in range(self.repeat_times)
        ]
