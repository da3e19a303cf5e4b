"""Two runs of one name on one broker at a time, from two folders: the second ends, and takes nothing of the first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.test_run_identity import trained
from tests.virtual import virtually
from trinity_agents.simulation import Simulation, until
from trinity_mq.messages import BatchClosed, BatchReady
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError, first_leaf
from trinity_mq.runtime.process import claim_folder, claimed_run_id, read_run_id, write_run_id
from trinity_mq.testing.virtual_time import run_virtually

BATCHES = 4
SETTINGS = ("synchronizer.sync_interval=2", "synchronizer.sync_offset=2")
PROMPT = 10.0
"""Seconds within which an agent of the second run ends."""


def two(tmp_path: Path) -> tuple[Simulation, Simulation]:
    """Two runs on one broker; the folder of the second is claimed as `trinity-mq run` does before it starts agents."""
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)
    claim_folder(second.folder)
    return first, second


async def failure(agent: Agent) -> str:
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
def test_an_agent_of_a_second_run_ends_with_one_sentence(tmp_path: Path, name: str, number: int) -> None:
    first, second = two(tmp_path)
    sentences: list[str] = []
    agents: dict[str, Any] = {
        "explorer": lambda: second.make_explorer(f"explorer-{number}"),
        "trainer": lambda: in_folder(second, second.make_trainer(f"trainer-{number}")),
        "operator": lambda: in_folder(second, second.make_operator(number)),
        "runner": lambda: in_folder(second, second.make_runner(f"runner-{number}")),
    }

    async def beside() -> None:
        await until(lambda: begun(first))
        sentences.append(await failure(agents[name]()))

    run_virtually(first.run(beside=beside), limit=3000)
    (sentence,) = sentences
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


def test_a_trainer_in_a_folder_that_names_no_run_does_not_wait_for_the_lock(tmp_path: Path) -> None:
    """It would take over without the checkpoints."""
    first = Simulation(tmp_path / "first", SETTINGS, batches=BATCHES)
    second = Simulation(tmp_path / "second", SETTINGS, batches=BATCHES, broker=first.broker)
    sentences: list[str] = []

    async def beside() -> None:
        await until(lambda: begun(first))
        sentences.append(await failure(in_folder(second, second.make_trainer("trainer-1"))))

    run_virtually(first.run(beside=beside), limit=3000)
    assert f"{first.folder} has another run folder than {second.folder}" in sentences[0]


def test_a_second_explorer_in_the_same_folder_waits_for_its_turn(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)
    ended: list[str] = []

    async def beside() -> None:
        await until(lambda: begun(sim))
        await sim.make_explorer("explorer-0").run()
        ended.append("explorer")

    async def trainer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(in_folder(sim, sim.make_trainer()).run())
            group.create_task(in_folder(sim, sim.make_trainer("trainer-1")).run())

    run_virtually(sim.run(beside=beside, trainer=trainer), limit=3000)
    assert ended == ["explorer"]
    assert sim.state().closed == BATCHES


def test_an_operator_leaves_the_manifests_of_another_run_to_that_run(tmp_path: Path) -> None:
    """It is started while a manifest of the first run waits, before it can have heard that run's explorer."""
    first, second = two(tmp_path)
    first.operators = 0
    ready: list[int] = []

    async def beside() -> None:
        await until(lambda: bool(first.waiting_in("closed")))
        await failure(in_folder(second, second.make_operator()))
        ready.append(len(first.published(BatchReady)))
        assert first.waiting_in("closed")
        await first.make_operator().run()

    run_virtually(first.run(beside=beside), limit=3000)
    assert ready == [0]
    assert len(trained(first)) == BATCHES


@virtually
async def test_a_manifest_of_another_run_is_not_dropped_while_no_explorer_is_heard(tmp_path: Path) -> None:
    """The other run's explorer may be about to come back."""
    first, second = two(tmp_path)
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
    claimed = read_run_id(tmp_path)
    claim_folder(tmp_path)
    assert read_run_id(tmp_path) == claimed
    run_virtually(sim.run(), limit=1000)
    assert sim.state().run_id == claimed


def test_an_id_that_a_run_has_used_is_not_used_again(tmp_path: Path) -> None:
    claim_folder(tmp_path)
    claimed = claimed_run_id(tmp_path)
    assert claimed == read_run_id(tmp_path)
    write_run_id(tmp_path, claimed)
    assert claimed_run_id(tmp_path) != claimed


@pytest.mark.parametrize("name", ["state", "checkpoints"])
def test_a_folder_of_an_earlier_release_is_not_claimed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    claim_folder(tmp_path)
    assert read_run_id(tmp_path) is None
