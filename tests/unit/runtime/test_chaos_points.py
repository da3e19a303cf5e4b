"""An agent stops itself between a publish's confirm and an acknowledgement where that is armed, and nowhere else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from trinity_agents.trainer.loop import CheckpointSaver
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import BatchClosed, TaskResult, TaskResults
from trinity_mq.proof.chaos.points import INSIDE
from trinity_mq.proof.chaos.targets.marks import ArmedPoints, Hit
from trinity_mq.runtime.deliveries import acknowledge, envelope
from trinity_mq.runtime.processes import chaos_points
from trinity_mq.runtime.processes.chaos_points import MarkedPoints, mark_bus
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually

TOPOLOGY = Topology("run")
RESULT = TaskResult(batch=1, ticket="t", task_id=1, attempt="a", outcome="finished")


async def connected(broker: MemoryBroker | None = None) -> MemoryBus:
    bus = MemoryBus(broker or MemoryBroker(), TOPOLOGY, config=BrokerConfig())
    await bus.connect()
    await bus.declare(*TOPOLOGY.durable)
    return bus


def armed(folder: Path, point: str, occurrence: int = 1) -> Path:
    path = folder / f"{INSIDE[point].role} {INSIDE[point].passed}{chaos_points.ARMED}"
    path.write_text(f"t {occurrence}")
    return path


def test_it_stops_at_the_occurrence_that_is_armed_after_the_confirm(tmp_path: Path) -> None:
    seen: list[int] = []

    async def play() -> None:
        broker = MemoryBroker()
        bus = await connected(broker)
        results = broker.queues[TOPOLOGY.results.name]
        mark_bus(bus, MarkedPoints(tmp_path, "runner", "runner-0", lambda: seen.append(results.depth)))
        path = armed(tmp_path, "result_confirmed", occurrence=2)
        for number, message in enumerate((RESULT, TaskResults(results=[RESULT]), RESULT)):
            await bus.publish(TOPOLOGY.exchange("results"), "1", envelope(message, message_id=f"m{number}"))
        assert not path.exists()

    run_virtually(play(), limit=100)
    assert seen == [2], "once, behind the second confirm, and what holds several is one"
    assert (tmp_path / f"t runner-0 {os.getpid()}{chaos_points.HIT}").exists()


def test_it_stops_before_the_acknowledgement_and_the_message_is_still_its_own(tmp_path: Path) -> None:
    async def play() -> None:
        bus = await connected()
        mark_bus(bus, MarkedPoints(tmp_path, "operator", "operator-0", lambda: bus.disconnect("stopped")))
        armed(tmp_path, "manifest_unacknowledged")
        await bus.publish(TOPOLOGY.exchange("batches"), "closed", envelope(BatchClosed(batch=1, ticket="t")))
        async with await bus.consume(TOPOLOGY.closed) as feed:
            assert not await acknowledge(await anext(feed))
            bus.reconnect()
            assert (await anext(feed)).deliveries_before == 1

    run_virtually(play(), limit=100)


def test_points_of_another_role_and_of_another_name_pass_by_and_of_two_agents_one_stops(tmp_path: Path) -> None:
    stops: list[str] = []
    agents = [MarkedPoints(tmp_path, "gateway", name, lambda name=name: stops.append(name)) for name in ("g-0", "g-1")]
    armed(tmp_path, "result_confirmed")
    armed(tmp_path, "answer_confirmed")
    for name in ("task_result", "session_opened"):
        agents[0].passed(f"confirmed {name}")
    assert stops == []
    for agent in agents:
        agent.passed("confirmed session_call")
    assert stops == ["g-0"]


async def test_whoever_arms_is_told_who_stopped_and_disarms_what_nobody_passed(tmp_path: Path) -> None:
    marks = ArmedPoints(tmp_path)
    agent = MarkedPoints(tmp_path, "trainer", "trainer-0", lambda: None)

    async def pass_it() -> None:
        agent.passed("saved checkpoint")  # begins once the point is armed and is waited for

    passing = asyncio.create_task(pass_it())
    assert await marks.hit("checkpoint_saved", 1, lambda: False, 5.0) == Hit("trainer-0", os.getpid())
    await passing
    assert await marks.hit("checkpoint_saved", 1, lambda: False, 0.0) is None
    assert await marks.hit("checkpoint_saved", 1, lambda: True, 5.0) is None
    assert list(tmp_path.iterdir()) == []


async def test_who_stops_itself_just_before_the_run_is_over_is_told_and_so_continued(tmp_path: Path) -> None:
    agent = MarkedPoints(tmp_path, "trainer", "trainer-0", lambda: None)

    def over() -> bool:
        agent.passed("saved checkpoint")
        return True

    assert await ArmedPoints(tmp_path).hit("checkpoint_saved", 1, over, 5.0) == Hit("trainer-0", os.getpid())


async def test_a_checkpoint_is_a_point_once_it_is_written_and_before_anybody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Store:
        async def save(self, write: object, state: object) -> None:
            seen.append("written")

    async def committed(state: object, seconds: float) -> None:
        seen.append("known")

    points = MarkedPoints(tmp_path, "trainer", "trainer-0", lambda: seen.append("stopped"))
    monkeypatch.setattr(chaos_points, "_points", [points])
    armed(tmp_path, "checkpoint_saved")
    saver = CheckpointSaver(Store(), FakeLearner(), in_background=False)  # type: ignore[arg-type]
    await saver.save(None, committed)  # type: ignore[arg-type]
    assert seen == ["written", "stopped", "known"]
