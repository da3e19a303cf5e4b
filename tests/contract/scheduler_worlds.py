"""The two worlds in which the contract of a Scheduler is tested: MemoryBus in virtual time, and RabbitMQ with runner
processes. In both two runners do slices of a scripted workflow; none of them asks an engine, though one is announced.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.broker_fixtures import delete_run
from tests.contract.scripted_workflow import Scripted
from trinity_agents.runner.agent import Runner
from trinity_mq.bus import Bus, Topology
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.config import Config, load_config
from trinity_mq.messages import Heartbeat
from trinity_mq.models.inference import EngineSnapshot
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.scheduling import Scheduler
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Task

ROOT = Path(__file__).parents[2]
RUNNERS = ("runner-0", "runner-1")
ANNOUNCED = 0.2
"""Seconds between beats of the engine."""
Scene = Callable[["Stage"], Awaitable[None]]


def settings(run: str) -> dict[str, Any]:
    return {
        "name": run,
        "model": {"tiny": {}},
        "explorer": {"max_retry_times": 0, "max_timeout": 100, "batch_timeout": 300},
        "runner": {"concurrency": 16},
        "monitor": {"tensorboard": False},
    }


async def announce_engine(bus: Bus, topology: Topology) -> None:
    """Say that there is an engine, until cancelled."""
    snapshot = EngineSnapshot("engine", alive=True, state="current", url="http://127.0.0.1:9", name="n", version=(1, 0))
    incarnation, seq = secrets.token_hex(6), 0
    while True:
        seq += 1
        beat = Heartbeat(
            role="engine", id="engine", seq=seq, incarnation=incarnation, lease=60, state="working",
            detail=snapshot.detail(),
        )  # fmt: skip
        await bus.publish(topology.exchange("telemetry"), "beat.engine.engine", envelope(beat))
        await asyncio.sleep(ANNOUNCED)


class Stage:
    """What a scenario plays on. Seconds in scenarios are units: shorter where time is real."""

    def __init__(self, scheduler: Scheduler, unit: float) -> None:
        self.scheduler, self.unit = scheduler, unit

    def task(self, n: int = 0, seconds: float = 0.0, repeat: int = 1, is_eval: bool = False, **record: Any) -> Task:
        if "stagger" in record:
            record |= {"stagger": record["stagger"] * self.unit, "key": secrets.token_hex(8)}
        record |= {"n": n, "seconds": seconds * self.unit}
        return Task(workflow=Scripted, repeat_times=repeat, raw_task=record, is_eval=is_eval)

    def tasks(self, *seconds: float, **more: Any) -> list[Task]:
        return [self.task(n, each, **more) for n, each in enumerate(seconds)]

    async def sleep(self, units: float) -> None:
        await asyncio.sleep(units * self.unit)

    @asynccontextmanager
    async def lasts(self, least: float, most: float) -> AsyncIterator[None]:
        """What is inside takes between so many units; on a busy machine longer, where time is real."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        yield
        spent = (loop.time() - started) / self.unit
        assert least - 1e-6 <= spent, spent
        if self.unit == 1.0:
            assert spent <= most, spent

    async def idle_again(self) -> None:
        """Return once the runners hold nothing; they are asked by their beats."""
        await self.heard(lambda states: not any(state.get("running", 1) for state in states))

    async def heard(self, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Return once the states of both runners are known, and such that ``holds``."""
        async with asyncio.timeout(60):
            while len(states := list(self.scheduler.get_all_state().values())) < len(RUNNERS) or not holds(states):
                await self.scheduler.peers.changed.wait()


class SchedulerWorld(ABC):
    """Plays scenarios, each with a scheduler of its own."""

    unit: float
    ready = False
    """The runners have been heard, and have heard of the engine."""

    @abstractmethod
    def play(self, scene: Scene, *overrides: str) -> None:
        """Play ``scene`` with a started scheduler, configured with ``overrides``, and see that it leaves nothing."""

    async def _on(self, bus: Bus, topology: Topology, config: Config, scene: Scene) -> None:
        scheduler = Scheduler(config, bus=bus, topology=topology)
        announcing = asyncio.ensure_future(announce_engine(bus, topology))
        try:
            await scheduler.start()
            stage = Stage(scheduler, self.unit)
            if not self.ready:
                await stage.heard(lambda states: True)
                await asyncio.sleep(2 * ANNOUNCED)
                self.ready = True
            await scene(stage)
            assert not scheduler.dispatcher.tickets, "the scenario fetched or cleared everything"
        finally:
            await scheduler.stop()
            announcing.cancel()


class MemoryWorld(SchedulerWorld):
    """Runners in this process, time virtual."""

    unit = 1.0

    def play(self, scene: Scene, *overrides: str) -> None:
        """See :class:`SchedulerWorld`; each time with another broker and other runners."""
        topology, self.ready = Topology("contract"), False

        async def main() -> None:
            config, broker = load_config(settings("contract"), overrides), MemoryBroker()

            def bus() -> MemoryBus:
                return MemoryBus(broker, topology, config=config.broker)

            runners = [Runner(config, bus=bus(), topology=topology, agent_id=name) for name in RUNNERS]
            working = [asyncio.ensure_future(runner.run()) for runner in runners]
            mine = bus()
            await mine.connect()
            try:
                await self._on(mine, topology, config, scene)
                assert not [name for name in broker.queues if ".batch." in name], "no batch queue is left"
            finally:
                for runner in runners:
                    runner.drain()
                await asyncio.wait(working)
                await mine.close()

        run_virtually(main(), limit=5000)

    def close(self) -> None:
        """Nothing outlives a scenario."""


class RabbitWorld(SchedulerWorld):
    """Two runner processes for all scenarios, time real."""

    unit = 0.3

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.run = url, f"t{secrets.token_hex(5)}"
        self.topology = Topology(self.run)
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump({**settings(self.run), "run_dir": str(folder / "run")}), encoding="utf-8")
        environment = {
            **os.environ,
            URL_VARIABLE: url,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agents")]),
        }
        command = [sys.executable, "-m", "trinity_mq.cli.main", "runner", str(path), "--id"]
        self.processes = [subprocess.Popen([*command, name], env=environment) for name in RUNNERS]

    def play(self, scene: Scene, *overrides: str) -> None:
        async def main() -> None:
            config = load_config(settings(self.run), overrides)
            async with AsyncExitStack() as stack:
                bus = RabbitBus(self.url, self.topology, config=config.broker, name="contract")
                stack.push_async_callback(bus.close)
                await bus.connect()
                await self._on(bus, self.topology, config, scene)

        asyncio.run(main())

    def close(self) -> None:
        """End the runners and leave nothing on the broker."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(30)
        asyncio.run(delete_run(self.url, self.topology))
