"""The trainer begins no sync while the explorer evaluates the present version under style ``fixed``."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from trinity_agents.simulation import Simulation, until
from trinity_mq.messages import Heartbeat, SyncEvent
from trinity_mq.sync.gate.records import Phase
from trinity_mq.testing.virtual_time import run_virtually

LEASE, EVAL_TIMEOUT = 15.0, 90.0


def seconds_held(
    folder: Path, style: str = "fixed", evaluating: int | None = 3, served: bool = True, lease: float = LEASE
) -> float:
    """Return for how long a trainer that has heard one heartbeat of the explorer holds its sync back."""
    sim = Simulation(folder, (f"synchronizer.sync_style={style}", f"explorer.eval_timeout={EVAL_TIMEOUT}"))

    async def main() -> float:
        trainer, now = sim.make_trainer(), asyncio.get_running_loop().time
        detail = {"evaluating": evaluating}
        trainer.peers.receive(
            Heartbeat(role="explorer", id="e", seq=1, incarnation="i", lease=lease, state="working", detail=detail)
        )
        trainer.loop.gate.machine.join("engine", (1, 0) if served else None, now())
        began = now()
        await trainer.loop.evaluation_ended()
        return now() - began

    found = run_virtually(main(), limit=1000)
    assert isinstance(found, float)
    return found


def test_an_explorer_that_died_releases_the_sync_when_its_lease_ends(tmp_path: Path) -> None:
    assert seconds_held(tmp_path) == pytest.approx(LEASE, abs=2.1)


def test_the_sync_is_held_back_no_longer_than_the_evaluation_may_take(tmp_path: Path) -> None:
    assert seconds_held(tmp_path, lease=1e6) == pytest.approx(EVAL_TIMEOUT)


def test_the_end_of_the_evaluation_releases_the_sync_at_once(tmp_path: Path) -> None:
    assert seconds_held(tmp_path, evaluating=None) == 0.0


def test_without_an_engine_that_serves_a_version_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert seconds_held(tmp_path, served=False) == 0.0


def test_in_other_styles_engines_take_weights_during_an_evaluation(tmp_path: Path) -> None:
    assert seconds_held(tmp_path, style="fully_async") == 0.0


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
