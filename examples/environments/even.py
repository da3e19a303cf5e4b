"""An environment of `verifiers`: an even digit is asked for. It is imported in the environment's own Python only."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


class Even(vf.Task[vf.TaskData]):
    """Asks, and scores the answer."""

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """Return 1 for an even digit at the beginning, else 0."""
        return float((trace.last_reply or "")[:1] in {"0", "2", "4", "6", "8"})


def make_task(record: dict[str, Any]) -> Even:
    """Return the task of a record."""
    return Even(vf.TaskData(prompt=record["question"]))
