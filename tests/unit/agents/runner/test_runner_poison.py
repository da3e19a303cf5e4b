"""Slices that kill, hang or eat, in real processes: each costs itself only, and its batch has all its outcomes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.agents.runner.harness import parts, results, unanswered
from tests.unit.agents.world import World, a_slice, send_slice
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.process_pool import ProcessPool
from trinity_mq.messages import TaskBody, TaskSlice

WORKFLOWS = """
import ctypes, os, time
from trinity_mq.experience import Experience
from trinity_mq.workflows import Workflow

class Fine(Workflow):
    is_async = True
    async def run_async(self):
        return [Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0)]

class Blocks(Workflow):
    def run(self):
        return [Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0)]

class Exits(Fine):
    async def run_async(self):
        os._exit(1)

class PointsNowhere(Fine):
    async def run_async(self):
        ctypes.string_at(0)

class Eats(Fine):
    async def run_async(self):
        eaten = []
        while True:
            eaten.append(bytearray(16 * 2**20))

class Ignores(Fine):
    async def run_async(self):
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                continue

class BlockingExits(Workflow):
    def run(self):
        os._exit(1)

class BlockingHangs(Workflow):
    def run(self):
        time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poison_workflows.py").write_text(WORKFLOWS)
    monkeypatch.syspath_prepend(tmp_path)


def task_slice(kind: str, task: int, **fields: object) -> TaskSlice:
    limits = {"max_timeout": 20.0, "slice_timeout": 20.0, "max_retry_times": 0, **fields}
    body = TaskBody(workflow=f"poison_workflows.{kind}", raw_task={"n": 0})
    return a_slice(task=task, runs=1, **limits).model_copy(update={"task": body})


async def outcomes(world: World, wanted: int, *task_slices: TaskSlice, returns: int) -> dict[int, str]:
    """Have one runner do the slices, which have come back ``returns`` times; return how they ended."""
    for each in task_slices:
        await send_slice(world, each)
    if returns:
        world.held_back("tasks.train", returns)
    pool = ProcessPool(2, grace=0.3)
    runner = Runner(world.config, bus=world.bus(), topology=world.topology, agent_id="runner-0", isolated=pool)
    engine = {"id": "e", "url": "http://127.0.0.1:9", "name": "m", "role": "rollout", "version": [1, 0]}
    async with world.living(runner), asyncio.timeout(50):
        await world.beat("engine", "e", lease=100.0, **engine)
        while len(results(world)) < wanted or unanswered(world):
            await runner.woken.wait(0.05)
    return {result.task_id: result.outcome for result in results(world)}


async def test_each_poisonous_slice_costs_itself_only(tmp_path: Path) -> None:
    world = World("broker.delivery_limit=3", "runner.memory_limit=200000000", f"run_dir={tmp_path / 'run'}")
    task_slices = [
        task_slice("Fine", 0),
        task_slice("Exits", 1),
        task_slice("PointsNowhere", 2),
        task_slice("Eats", 3),
        task_slice("Ignores", 4, slice_timeout=1.0),
        task_slice("Fine", 5),
    ]
    ended = await outcomes(world, 6, *task_slices, returns=1)
    assert ended == {0: "finished", 1: "poisoned", 2: "poisoned", 3: "failed", 4: "failed", 5: "finished"}
    messages = {result.task_id: str(result.message) for result in results(world)}
    assert "killed its process; 3 attempts failed or were lost" in messages[1]
    assert "SIGSEGV" in messages[2]
    assert "MemoryError" in messages[3]
    assert "was killed" in messages[4]
    assert len(parts(world)) == 2
    dead = world.stored("dead")
    assert [(each.headers["returned"], each.headers["failed-tries"]) for each in dead] == [(1, 2)] * 2
    for letter in dead:
        lines = letter.headers["failures"].split("\n")
        assert [line.split(" of ")[0][:19] for line in lines] == ["delivery 2: attempt", "delivery 3: attempt"]
        assert all(" of runner-0: it killed its process: " in line for line in lines)


async def test_a_blocking_slice_in_a_process_can_be_killed_the_first_time(tmp_path: Path) -> None:
    world = World("broker.delivery_limit=2", "runner.blocking=process", f"run_dir={tmp_path / 'run'}")
    task_slices = [
        task_slice("Blocks", 0),
        task_slice("BlockingExits", 1),
        task_slice("BlockingHangs", 2, slice_timeout=1.0),
    ]
    ended = await outcomes(world, 3, *task_slices, returns=0)
    assert ended == {0: "finished", 1: "poisoned", 2: "failed"}
