"""Lives of a trainer in a simulated run, each killed behind a checkpoint."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence

from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.agent import Trainer

KILLED_AT = (4, 6, 8)
"""Progress at which lives of a run of nine batches end: each behind a checkpoint, with one every three batches."""


async def lived(sim: Simulation, make: Callable[[], Trainer], seed: int, ends: Sequence[int] = KILLED_AT) -> None:
    """Run trainers one after another, each killed within a step's time of reaching the next progress in ``ends``, and
    one until it ends by itself.
    """
    dice = random.Random(seed)
    for end in ends:
        trainer = make()
        life = asyncio.create_task(trainer.run())
        await until(lambda: trainer.loop.progress >= end)  # noqa: B023  # awaited here
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        assert await killed(life), f"it ended before it was killed at progress {end}"
    await make().run()


def begun_at(sim: Simulation) -> list[int | None]:
    """Return the progress of the checkpoint from which each life went on, None where it was at the first step."""
    files = sorted((sim.folder / "history").glob("*.jsonl"), key=lambda path: int(path.stem))
    origins = [json.loads(path.read_text().splitlines()[0])["resumed_from"] for path in files]
    return [origin and origin["progress"] for origin in origins]
