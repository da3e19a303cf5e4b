"""Real runner processes on a real broker: slices that kill them, and runners that are told to end."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.config import Config, SupervisorConfig, load_config
from trinity_mq.experience import Experience
from trinity_mq.messages import Heartbeat
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.processes.supervisor import ProcessEvent, ProcessSpec, Supervisor
from trinity_mq.scheduling import Scheduler
from trinity_mq.workflows import Task
from trinity_mq.workflows.workflow import load_workflow

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
WORKFLOWS = """
import asyncio, ctypes, os, time
from pathlib import Path
from trinity_mq.experience import Experience
from trinity_mq.workflows import Workflow

class Fine(Workflow):
    is_async = True
    async def run_async(self):
        await asyncio.sleep(0.1)
        return [Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0)]

class Exits(Fine):
    async def run_async(self):
        os._exit(1)

class PointsNowhere(Fine):
    async def run_async(self):
        ctypes.string_at(0)

class IgnoresItsCancellation(Fine):
    async def run_async(self):
        while True:
            try:
                await asyncio.sleep(1000)
            except BaseException:
                continue

class Holds(Workflow):
    def run(self):
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                continue

class Patient(Fine):
    async def run_async(self):
        with (Path(__file__).parent / "tries").open("a") as tries:
            tries.write(f"{os.getpid()} ")
        if not (Path(__file__).parent / "go").exists():
            (Path(__file__).parent / "first").write_text(str(os.getpid()))
            await asyncio.sleep(1000)
        return await super().run_async()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runner_workflows.py").write_text(WORKFLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("runner_workflows", None)
    return tmp_path


def task(kind: str, runs: int = 1) -> Task:
    return Task(workflow=load_workflow(f"runner_workflows.{kind}"), repeat_times=runs, raw_task={"question": "?"})


class Stage:
    """A scheduler, runner processes under a supervisor, and an engine that is only said to be there."""

    def __init__(self, config: Config, path: Path, url: str) -> None:
        self.config, self.events = config, list[ProcessEvent]()
        environment = {
            "TRINITY_MQ_BROKER_URL": url,
            "PYTHONPATH": os.pathsep.join([str(path.parent), str(ROOT), str(ROOT / "agents")]),
            "OMP_NUM_THREADS": "1",
        }
        command = (sys.executable, "-m", "trinity_mq.cli.main", "runner", str(path), "--id")
        names = ("runner-0", "runner-1")
        self.runners = Supervisor(
            [ProcessSpec(name=name, role="runner", argv=(*command, name), env=environment) for name in names],
            config=SupervisorConfig(grace=15.0),
            log_dir=path.parent / "logs",
            on_event=self.events.append,
        )

    async def engine(self, bus: Bus, topology: Topology) -> None:
        detail = {"id": "e", "url": "http://127.0.0.1:9", "name": "m", "role": "rollout", "version": [0, 0]}
        for seq in range(1_000_000):
            beat = Heartbeat(
                role="engine", id="e", seq=seq, incarnation="x", lease=60.0, state="working", detail=detail
            )
            await bus.publish(topology.exchange("telemetry"), "beat.engine.e", envelope(beat))
            await asyncio.sleep(0.2)  # a runner that was started again must not wait for one


@asynccontextmanager
async def playing(
    folder: Path, topology: Topology, url: str, **sections: object
) -> AsyncIterator[tuple[Stage, Scheduler]]:
    settings = {"name": topology.run, "model": {"tiny": {}}, "run_dir": str(folder / "run"), **sections}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path, [f"broker.url={url}"])
    stage = Stage(config, path, url)
    bus = create_bus(config.broker, topology, "test")
    await bus.connect()
    scheduler = Scheduler(config, bus=bus, topology=topology)
    await scheduler.start()
    running = [asyncio.ensure_future(stage.engine(bus, topology)), asyncio.ensure_future(stage.runners.run())]
    try:
        yield stage, scheduler
    finally:
        for one in running:
            one.cancel()
        await asyncio.wait(running)
        await scheduler.stop()
        await bus.close()


def uids(experiences: list[Experience]) -> list[str]:
    return sorted(experience.eid.rid for experience in experiences)


@pytest.mark.extended
async def test_poison_costs_its_slices_only_and_the_batch_completes(
    broker_url: str, topology: Topology, folder: Path
) -> None:
    sections = {
        "explorer": {"max_timeout": 3.0, "max_retry_times": 0},
        "broker": {"delivery_limit": 3},
        "runner": {"concurrency": 4, "recycle_after": 30},
    }
    async with playing(folder, topology, broker_url, **sections) as (stage, scheduler):
        poison = [task(kind) for kind in ("Exits", "PointsNowhere", "IgnoresItsCancellation", "Holds")]
        scheduler.schedule([task("Fine", 2) for _ in range(10)] + poison + [task("Fine", 2) for _ in range(30)], 1)
        statuses, experiences = await scheduler.get_results(1, timeout=50)
        assert len(statuses) == 44
        failed = [str(status.message) for status in statuses if not status.ok]
        assert len(failed) == 4, failed
        # the third try ended with its own process, or with a runner that the other slice killed
        poisoned = r"^(it killed its process; 3 attempts|3 attempts at this slice) failed or were lost"
        assert sum(bool(re.search(poisoned, message)) for message in failed) == 2, failed
        assert len(set(uids(experiences))) == len(experiences) == 80
        ends = [event.code for event in stage.events if event.what == "died"]
        assert len(ends) <= 2  # one for each slice that kills, the first time


async def test_a_runner_told_to_end_gives_back_what_it_cannot_finish(
    broker_url: str, topology: Topology, folder: Path
) -> None:
    sections = {"runner": {"concurrency": 4, "drain_timeout": 1.0}}
    async with playing(folder, topology, broker_url, **sections) as (stage, scheduler):
        tries, first_try = folder / "tries", folder / "first"
        os.mkfifo(first_try)
        scheduler.schedule([task("Patient"), *(task("Fine") for _ in range(8))], 1)
        async with asyncio.timeout(30):
            pid = int(await asyncio.to_thread(first_try.read_text))  # a pipe: returns when it is written to
        (folder / "go").touch()
        name = next(event.name for event in stage.events if event.pid == pid)
        async with asyncio.timeout(10):
            await stage.runners.drain(name)
        statuses, experiences = await scheduler.get_results(1, timeout=30)
        assert [status.ok for status in statuses] == [True] * 9
        assert len(set(uids(experiences))) == len(experiences) == 9
        assert len(tries.read_text().split()) == 2
        assert [event.code for event in stage.events if event.what == "stopped"] == [0]
