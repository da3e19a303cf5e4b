"""The trainer begins no sync while the explorer evaluates the present version under style ``fixed``."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.virtual import virtually
from trinity_agents.simulation import Simulation, until
from trinity_mq.messages import Heartbeat, SyncEvent
from trinity_mq.sync.gate.records import Phase
from trinity_mq.testing.virtual_time import run_virtually

LEASE, EVAL_TIMEOUT = 15.0, 90.0


@dataclass
class Held:
    """An evaluation of which a trainer heard one heartbeat."""

    style: str = "fixed"
    evaluating: int | None = 3
    served: bool = True
    lease: float = LEASE


@pytest.mark.parametrize(
    ("held", "seconds"),
    [
        pytest.param(Held(), pytest.approx(LEASE, abs=2.1), id="until the lease of an explorer that died ends"),
        pytest.param(Held(lease=1e6), pytest.approx(EVAL_TIMEOUT), id="no longer than the evaluation may take"),
        pytest.param(Held(evaluating=None), 0.0, id="not after the evaluation"),
        pytest.param(Held(served=False), 0.0, id="not without an engine that serves a version"),
        pytest.param(Held(style="fully_async"), 0.0, id="not in other styles"),
    ],
)
@virtually
async def test_a_sync_is_held_back_for_an_evaluation(tmp_path: Path, held: Held, seconds: float) -> None:
    sim = Simulation(tmp_path, (f"synchronizer.sync_style={held.style}", f"explorer.eval_timeout={EVAL_TIMEOUT}"))
    trainer, now = sim.make_trainer(), asyncio.get_running_loop().time
    beat = {"role": "explorer", "id": "e", "seq": 1, "incarnation": "i", "lease": held.lease, "state": "working"}
    trainer.peers.receive(Heartbeat(**beat, detail={"evaluating": held.evaluating}))
    trainer.loop.gate.machine.join("engine", (1, 0) if held.served else None, now())
    began = now()
    await trainer.loop.evaluation_ended()
    assert now() - began == seconds


def test_each_evaluation_of_a_run_is_served_by_one_version_and_delays_the_next_sync(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=6, runner_seconds=lambda one: 20.0 if one.lane == "eval" else 0.1)
    begun: list[int | None] = []

    async def watch() -> None:
        await until(lambda: bool(sim.trainers))
        keeper = sim.trainer.loop.gate
        while not sim.trainer.loop.finished:
            await keeper.changed.until(lambda: keeper.machine.phase is not Phase.IDLE)
            begun.append(sim.explorer.exploration.evaluations.running if sim.explorer.exploration else None)
            await keeper.changed.until(lambda: keeper.machine.phase is Phase.IDLE)

    async def beside() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(150.0):
                await watch()

    run_virtually(sim.run(beside=beside), limit=2000)
    lows, highs = (dict(sim.values(f"eval/held/version/{end}")) for end in ("min", "max"))
    assert lows == highs == {0: 0.0, 2: 1.0, 4: 3.0, 6: 6.0}
    assert begun
    assert begun[1:] == [None] * (len(begun) - 1), "no try began during an evaluation"
    assert [event.reason for event in sim.published(SyncEvent) if event.verb == "abort"] == []
