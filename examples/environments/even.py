"""An environment of `verifiers` that asks for an even digit. It is imported only in the Python of the environment."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


class Even(vf.Task[vf.TaskData]):
    """A task that scores whether the answer begins with an even digit."""

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """Return 1 for an even digit at the beginning, else 0."""
        return float((trace.last_reply or "")[:1] in {"0", "2", "4", "6", "8"})


def make_task(record: dict[str, Any]) -> Even:
    """Return the task of a record."""
    return Even(vf.TaskData(prompt=record["question"]))
