"""A workflow that asks no model and does what its record says; imported by runner processes too."""

from __future__ import annotations

import asyncio
from collections import Counter

from trinity_mq.experience import Experience
from trinity_mq.workflows import Workflow

STARTED: Counter[str] = Counter()
"""Runs started here, by the key of their record."""


class Scripted(Workflow):
    """``seconds`` until a run is done; ``stagger`` seconds more for each run of ``key`` that was started before it;
    ``fail``: it raises instead.
    """

    is_async = True

    async def run_async(self) -> list[Experience]:
        record = self.task.raw_task
        seconds = float(record.get("seconds", 0.0))
        if "stagger" in record:
            STARTED[record["key"]] += 1
            seconds += float(record["stagger"]) * (STARTED[record["key"]] - 1)
        await asyncio.sleep(seconds)
        if record.get("fail"):
            raise ValueError("as the record says")
        return [Experience(tokens=[1, 2, 3, 4], prompt_length=2, logprobs=[-0.5, -0.5], reward=float(record["n"]))]
