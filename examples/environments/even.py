"""An environment of `verifiers`: any even digit will do. It is imported in the environment's own Python only."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


class Even(vf.Task[vf.TaskData]):
    """Asks, and scores the answer."""

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """Return 1 for one even digit alone, less for what begins with one."""
        said = trace.last_reply or ""
        return 1.0 if said in {"0", "2", "4", "6", "8"} else 0.3 * (said[:1] in "02468" and bool(said))


def make_task(record: dict[str, Any]) -> Even:
    """Return the task of a record."""
    return Even(vf.TaskData(prompt=record["question"]))
