"""A run that begins under a name whose earlier run left its messages on the broker (docs/protocol.md, Keys)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.explorer.test_explorer import restarted
from tests.unit.agents.world import beside, failure
from trinity_agents.explorer.engine_hosting import EngineHosting
from trinity_agents.simulation import RECORDED, Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.bus.memory.queues import Stored, WorkQueue
from trinity_mq.messages import BatchClosed, BatchReady
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError, RestartRequested, first_leaf
from trinity_mq.runtime.process import claim_folder, claimed_run_id, read_run_id, write_run_id
from trinity_mq.testing.fakes import FakeEngine
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop

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
async def test_a_new_run_under_an_old_name_trains_on_its_own_tickets_alone(tmp_path: Path, moment: str) -> None:
    first, second = two(tmp_path)
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


def test_a_resumed_explorer_keeps_the_identity(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)
    before: list[str] = []

    async def half_way() -> None:
        await until(lambda: bool(sim.trainers) and sim.trainer.loop.progress == 2)
        before.append(sim.state().run_id)

    run_virtually(sim.run(explorer=restarted(sim, half_way)), limit=3000)
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

    error = failure(scene(), FatalError, limit=3000)
    assert "the checkpoints in" in str(error)
    assert "--fresh" in str(error)


def test_a_trainer_that_lives_on_ends_when_the_explorer_begins_another_run(tmp_path: Path) -> None:
    """Runners, operators and trainers may be started apart from the explorer, and outlive a removed run folder."""
    first, second = two(tmp_path)
    failure(first.run(explorer=lambda: begin_anew(first, second)), FatalError, limit=3000)
    assert not second.published(BatchClosed) or second.state().closed == 0


async def test_only_the_explorer_that_schedules_announces_the_run(tmp_path: Path) -> None:
    """One that waits for its end repeats its status, which may be that of a run that is over."""
    sim = Simulation(tmp_path, SETTINGS, batches=2)
    async with beside(sim.run()):
        await until(lambda: sim.explorer.detail().opened > 0)
        second = asyncio.create_task(sim.make_explorer("explorer-1").run())
        await until(lambda: sim.explorer.detail().opened > 0)
        assert sim.explorer.detail().run_id == ""
        await second


class Stopped(FakeEngine):
    stopped = False

    async def stop(self) -> None:
        self.stopped = True


def two(folder: Path) -> tuple[Simulation, Simulation]:
    """Two runs of one name on one broker."""
    first = Simulation(folder / "first", SETTINGS, batches=BATCHES)
    return first, Simulation(folder / "second", SETTINGS, batches=BATCHES, broker=first.broker)


async def begin_anew(first: Simulation, second: Simulation) -> None:
    """Be the explorer of the first run until it has trained on a batch, then that of the second."""
    task = asyncio.get_running_loop().create_task(first.make_explorer().run())
    await until(lambda: bool(first.trainers) and first.trainer.loop.progress == 1)
    await killed(task)
    await second.make_explorer().run()


def test_runners_operators_and_hosts_of_engines_that_live_on_serve_the_new_run(tmp_path: Path) -> None:
    """The host stops its engines and starts anew: they hold weights of the earlier run, under version numbers that the
    new one uses again.
    """
    first, second = two(tmp_path)
    engine, errors = Stopped("far-engine"), []

    async def scene() -> None:
        async def host() -> None:
            bus, topology = first.bus(), first.topology
            try:
                await EngineHosting(first.config, bus=bus, topology=topology, agent_id="far", engines=[engine]).run()
            except ExceptionGroup as group:
                errors.append(group.subgroup(RestartRequested))

        async def trainer() -> None:
            task = asyncio.get_running_loop().create_task(first.make_trainer().run())
            await until(lambda: bool(second.explorers))
            assert engine.served
            await killed(task)
            await second.make_trainer().run()

        await first.run(explorer=lambda: begin_anew(first, second), trainer=trainer, beside=host)

    run_virtually(scene(), limit=20_000)
    assert errors != [None]
    assert len(errors) == 1
    assert engine.stopped
    assert trained(second) == manifests(second)
    assert len(trained(second)) == BATCHES


# -- two runs of one name at a time, from two folders: the second ends, and takes nothing of the first


PROMPT = 10.0
"""Seconds within which an agent of the second run ends."""


def claimed(tmp_path: Path) -> tuple[Simulation, Simulation]:
    """Two runs; the folder of the second is claimed as `trinity-mq run` does before it starts agents."""
    first, second = two(tmp_path)
    claim_folder(second.folder)
    return first, second


async def sentence_of(agent: Agent) -> str:
    """Run an agent; return the sentence of the FatalError with which it ends."""
    try:
        async with asyncio.timeout(PROMPT):
            await agent.run()
    except ExceptionGroup as group:
        error = first_leaf(group)
        assert isinstance(error, FatalError)
        return str(error)
    raise AssertionError("it ended without an error")


def begun(sim: Simulation) -> bool:
    return any(trainer.loop.progress for trainer in sim.trainers)


def in_folder(sim: Simulation, agent: Agent) -> Agent:
    agent.run_folder = sim.folder  # as run_daemon does
    return agent


@pytest.mark.parametrize("name", ["explorer", "trainer", "operator", "runner"])
@pytest.mark.parametrize("number", [0, 1], ids=["same id", "id of its own"])
async def test_an_agent_of_a_second_run_ends_with_one_sentence(tmp_path: Path, name: str, number: int) -> None:
    first, second = claimed(tmp_path)
    agents: dict[str, Any] = {
        "explorer": lambda: second.make_explorer(f"explorer-{number}"),
        "trainer": lambda: in_folder(second, second.make_trainer(f"trainer-{number}")),
        "operator": lambda: in_folder(second, second.make_operator(number)),
        "runner": lambda: in_folder(second, second.make_runner(f"runner-{number}")),
    }
    async with beside(first.run()):
        await until(lambda: begun(first))
        sentence = await sentence_of(agents[name]())
    assert "another run of the name 'sim' uses this broker" in sentence
    assert str(second.folder) in sentence
    assert "name=..." in sentence
    assert "trinity-mq broker clean sim" in sentence
    if name != "trainer":
        assert first.state().run_id in sentence
    # the first run did not notice
    assert trained(first) == [one.ticket for one in first.published(BatchClosed)]
    assert len(trained(first)) == BATCHES
    assert first.dead_letters() == []


async def test_a_trainer_in_a_folder_that_names_no_run_does_not_wait_for_the_lock(tmp_path: Path) -> None:
    """It would take over without the checkpoints."""
    first, second = two(tmp_path)
    async with beside(first.run()):
        await until(lambda: begun(first))
        sentence = await sentence_of(in_folder(second, second.make_trainer("trainer-1")))
    assert f"{first.folder} has another run folder than {second.folder}" in sentence


async def test_a_second_explorer_in_the_same_folder_waits_for_its_turn(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)

    async def trainer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(in_folder(sim, sim.make_trainer()).run())
            group.create_task(in_folder(sim, sim.make_trainer("trainer-1")).run())

    async with beside(sim.run(trainer=trainer)):
        await until(lambda: begun(sim))
        await sim.make_explorer("explorer-0").run()
    assert sim.state().closed == BATCHES


async def test_an_operator_leaves_the_manifests_of_another_run_to_that_run(tmp_path: Path) -> None:
    """It is started while a manifest of the first run waits, before it can have heard that run's explorer."""
    first, second = claimed(tmp_path)
    first.operators = 0
    async with beside(first.run()):
        await until(lambda: bool(first.waiting_in("closed")))
        await sentence_of(in_folder(second, second.make_operator()))
        assert first.published(BatchReady) == []
        assert first.waiting_in("closed")
        await first.make_operator().run()
    assert len(trained(first)) == BATCHES


async def test_a_manifest_of_another_run_is_not_dropped_while_no_explorer_is_heard(tmp_path: Path) -> None:
    """The other run's explorer may be about to come back."""
    first, second = claimed(tmp_path)
    await first.record_messages()
    client = await first.client()
    client.run_id = "of-the-first-run"
    manifest = BatchClosed(batch=1, ticket="t1", accepted=[], outcomes={}, repeat_times=1)
    await client.publish(first.topology.exchange("batches"), "closed", envelope(manifest, message_id="closed-t1"))
    operator = in_folder(second, second.make_operator())
    work: Coroutine[Any, Any, None] = operator.run()
    task = asyncio.get_running_loop().create_task(work)
    await asyncio.sleep(5 * HEARTBEAT_LEASE)
    assert operator.bus.foreign == 0
    operator.drain()
    await task
    await client.close()
    assert [stored.message_id for stored in first.waiting_in("closed")] == ["closed-t1"]
    assert first.published(BatchReady) == []


def test_a_run_takes_the_id_that_its_folder_was_claimed_with(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=2)
    claim_folder(tmp_path)
    claimed_id = claimed_run_id(tmp_path)
    claim_folder(tmp_path)
    assert read_run_id(tmp_path) == claimed_id
    run_virtually(sim.run(), limit=1000)
    assert (sim.state().run_id, sim.state().left_over) == (claimed_id, 0)
    assert all(bus.foreign == 0 for bus in (sim.explorer.bus, sim.trainer.bus))
    write_run_id(tmp_path, claimed_id)
    assert claimed_run_id(tmp_path) != claimed_id, "an id that a run has used is not used again"


@pytest.mark.parametrize("name", ["state", "checkpoints"])
def test_a_folder_of_an_earlier_release_is_not_claimed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    claim_folder(tmp_path)
    assert read_run_id(tmp_path) is None
