"""A run that begins under a name whose earlier run left its messages on the broker (docs/protocol.md, Keys)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.virtual import virtually
from trinity_agents.explorer.engine_hosting import EngineHosting
from trinity_agents.simulation import RECORDED, Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.bus.memory.queues import Stored, WorkQueue
from trinity_mq.messages import BatchClosed, ExplorerStatus
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.testing.fakes import FakeEngine
from trinity_mq.testing.virtual_time import run_virtually

BATCHES = 4
SETTINGS = ("synchronizer.sync_interval=2", "synchronizer.sync_offset=2", "trainer.save_interval=1")
LEASES = 40.0
"""Seconds after which nobody takes an agent of the earlier run for alive."""


def recorded(sim: Simulation) -> list[Stored]:
    """Copies of all messages on the exchanges of durable ones, of every run of the broker, in order."""
    queue = sim.broker.queues[sim.topology.prefix + RECORDED]
    assert isinstance(queue, WorkQueue)
    return [one for one in queue.messages if one.exchange != sim.topology.exchange("sync")]


def manifests(sim: Simulation) -> list[object]:
    """Tickets of the manifests of the run whose explorer state is in the folder of ``sim``."""
    own = sim.state().run_id
    found = [one for one in recorded(sim) if one.headers["kind"] == BatchClosed.kind and one.headers["run_id"] == own]
    return list(dict.fromkeys(one.headers["ticket"] for one in found))


def trained(sim: Simulation) -> list[str]:
    """Tickets that made the last trainer's weights, in order."""
    entries = lineage(sim.folder / "history", sim.trainer.loop.generation, sim.trainer.loop.progress)
    return [entry["ticket"] for entry in entries]


async def cut_off(sim: Simulation, moment: str) -> None:
    """Run until ``moment`` and kill every agent there: what is on the broker stays there."""
    run = asyncio.get_running_loop().create_task(sim.run())
    if moment == "at its end":
        await run
        return
    await until(lambda: bool(sim.trainers) and sim.trainer.loop.progress == 2)
    if moment == "with a manifest waiting":
        await until(lambda: bool(sim.explorer.exploration and sim.explorer.exploration.state.following.tickets))
    await killed(run)


@pytest.mark.parametrize("moment", ["at its end", "between two batches", "with a manifest waiting"])
@virtually
async def test_a_new_run_under_an_old_name_trains_on_its_own_tickets_alone(tmp_path: Path, moment: str) -> None:
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)
    earlier = 0
    await cut_off(first, moment)
    await asyncio.sleep(LEASES)
    earlier = len(recorded(first))
    await second.run()
    assert trained(second) == manifests(second)
    assert len(trained(second)) == BATCHES
    assert not set(trained(second)) & set(trained(first))
    state = second.state()
    assert state.run_id != first.state().run_id
    assert state.left_over > 0
    # an operator or runner answers what it took before it knew the run under the id of what it answers
    runs = {one.headers.get("run_id") for one in recorded(second)[earlier:] if one.headers["kind"] != "mark"}
    assert runs <= {state.run_id, first.state().run_id}
    assert second.dead_letters() == []


def test_the_first_run_of_a_name_finds_nothing_left_over(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=2)
    run_virtually(sim.run(), limit=1000)
    assert sim.state().left_over == 0
    assert all(bus.foreign == 0 for bus in (sim.explorer.bus, sim.trainer.bus))


def test_a_resumed_explorer_keeps_the_identity(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)
    before: list[str] = []

    async def explorer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_explorer().run())
        await until(lambda: bool(sim.trainers) and sim.trainer.loop.progress == 2)
        before.append(sim.state().run_id)
        await killed(first)
        await sim.make_explorer().run()

    run_virtually(sim.run(explorer=explorer), limit=3000)
    assert sim.state().run_id == before[0]
    assert trained(sim) == manifests(sim)


def test_checkpoints_of_another_run_are_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    """The explorer's state was removed alone: the checkpoints would be trained on with other batches."""
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)

    async def scene() -> None:
        await cut_off(sim, "between two batches")
        await asyncio.sleep(LEASES)
        shutil.rmtree(tmp_path / "state")
        await sim.run()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(scene(), limit=3000)
    error: Any = caught.value.subgroup(FatalError)
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert "the checkpoints in" in str(error)
    assert "--fresh" in str(error)


def test_a_trainer_that_lives_on_ends_when_the_explorer_begins_another_run(tmp_path: Path) -> None:
    """Runners, operators and trainers may be started apart from the explorer, and outlive a removed run folder."""
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)

    async def scene() -> None:
        async def explorer() -> None:
            task = asyncio.get_running_loop().create_task(first.make_explorer().run())
            await until(lambda: bool(first.trainers) and first.trainer.loop.progress == 1)
            await killed(task)
            await second.make_explorer().run()

        await first.run(explorer=explorer)

    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        run_virtually(scene(), limit=3000)
    assert caught.value.subgroup(FatalError) is not None
    assert not second.published(BatchClosed) or second.state().closed == 0


@virtually
async def test_runners_and_operators_that_live_on_serve_the_new_run(tmp_path: Path) -> None:
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)

    async def explorer() -> None:
        task = asyncio.get_running_loop().create_task(first.make_explorer().run())
        await until(lambda: bool(first.trainers) and first.trainer.loop.progress == 1)
        await killed(task)
        await second.make_explorer().run()

    async def trainer() -> None:
        task = asyncio.get_running_loop().create_task(first.make_trainer().run())
        await until(lambda: bool(second.explorers))
        await killed(task)
        await second.make_trainer().run()

    await first.run(explorer=explorer, trainer=trainer)
    assert trained(second) == manifests(second)
    assert len(trained(second)) == BATCHES


def test_only_the_explorer_that_schedules_announces_the_run(tmp_path: Path) -> None:
    """One that waits for its end repeats its status, which may be that of a run that is over."""
    sim = Simulation(tmp_path, SETTINGS, batches=2)
    statuses: list[ExplorerStatus] = []

    async def explorer() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_explorer().run())
        await until(lambda: sim.explorer.detail().opened > 0)
        second = loop.create_task(sim.make_explorer("explorer-1").run())
        await until(lambda: sim.explorer.detail().opened > 0)
        statuses.append(sim.explorer.detail())
        await first
        await second

    run_virtually(sim.run(explorer=explorer), limit=1000)
    assert statuses[0].run_id == ""


class Stopped(FakeEngine):
    stopped = False

    async def stop(self) -> None:
        self.stopped = True


@virtually
async def test_a_host_of_engines_that_lives_on_stops_them_and_starts_anew(tmp_path: Path) -> None:
    """They hold weights of the earlier run, under version numbers that the new one uses again."""
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)
    engine, errors = Stopped("far-engine"), []

    async def host() -> None:
        bus, topology = first.bus(), first.topology
        try:
            await EngineHosting(first.config, bus=bus, topology=topology, agent_id="far", engines=[engine]).run()
        except ExceptionGroup as group:
            errors.append(group.subgroup(RestartRequested))

    async def explorer() -> None:
        task = asyncio.get_running_loop().create_task(first.make_explorer().run())
        await until(lambda: bool(engine.served) and bool(first.trainers) and first.trainer.loop.progress == 1)
        assert not engine.stopped
        await killed(task)
        await second.make_explorer().run()

    async def trainer() -> None:
        task = asyncio.get_running_loop().create_task(first.make_trainer().run())
        await until(lambda: bool(second.explorers))
        await killed(task)
        await second.make_trainer().run()

    await first.run(explorer=explorer, trainer=trainer, beside=host)
    assert errors != [None]
    assert len(errors) == 1
    assert engine.stopped
    assert trained(second) == manifests(second)
