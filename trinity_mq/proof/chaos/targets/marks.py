"""Points inside agents, armed by files. An agent that passes an armed point reports it and stops itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.proof.chaos.points import INSIDE
from trinity_mq.runtime.processes.chaos_points import ARMED, HIT

LOOK_SECONDS = 0.02
"""Seconds between two checks for a stopped process."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A process that has stopped itself at a point."""

    agent: str
    pid: int


class ArmedPoints:
    """Arms points inside the agents of a run that was started with the same folder.

    Args:
        folder: Folder that is used only for the files of armed points.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (*folder.glob(f"*{ARMED}"), *folder.glob(f"*{HIT}")):
            path.unlink()

    async def hit(self, point: str, occurrence: int, over: Callable[[], bool], seconds: float) -> Hit | None:
        """Arm a point, and return the agent that stops itself at the point's occurrence number ``occurrence``. None: no
        agent has stopped within ``seconds``, or before the run was over; the point is then disarmed.
        """
        token = f"t{next(self._numbers)}"
        armed = self.folder / f"{INSIDE[point].role} {INSIDE[point].passed}{ARMED}"
        new = self.folder / f"{token}.new"
        new.write_text(f"{token} {occurrence}")
        new.rename(armed)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while (hit := self._take_hit(token)) is None and not over():  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_SECONDS)  # a stopped process does not notify anyone
                    if hit is not None:
                        return hit
        finally:
            armed.unlink(missing_ok=True)
        return self._take_hit(token)  # an agent may have stopped itself since the last look

    def _take_hit(self, token: str) -> Hit | None:
        for path in self.folder.glob(f"{token} *{HIT}"):
            _, agent, pid = path.name.removesuffix(HIT).split(" ")
            path.unlink()
            return Hit(agent, int(pid))
        return None
