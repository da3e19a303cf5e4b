"""An environment of `verifiers`: the largest of three digits. It is imported in the environment's own Python only."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf


class DigitsData(vf.TaskData):
    """One question."""

    answer: str


class Digits(vf.Task[DigitsData]):
    """Asks it, and scores the last answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right digit alone, less for what begins with it."""
        said = trace.last_reply or ""
        return 1.0 if said == self.data.answer else 0.4 * said.startswith(self.data.answer)


def make_task(record: dict[str, Any]) -> Digits:
    """Return the task of a record."""
    return Digits(DigitsData(prompt=record["question"], answer=record["answer"]))
