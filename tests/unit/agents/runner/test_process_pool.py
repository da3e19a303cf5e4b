from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.unit.agents.runner.harness import parts, results, unanswered
from tests.unit.agents.world import World, a_slice, send_slice
from tests.unit.rollout.scripted_engine import completion, scripted_engine
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.process_pool import ChildDied, ProcessPool
from trinity_mq.config import Config
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody, TaskSlice, encode
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.workflows import Workflow

WORKFLOWS = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from trinity_mq.experience import Experience
from trinity_mq.workflows import SandboxFailed, Workflow

HERE = Path(__file__).parent

class Asks(Workflow):
    is_async = True
    async def run_async(self):
        self.before()
        experiences = await self.model.chat_async([{"role": "user", "content": "q"}])
        for experience in experiences:
            experience.reward = 0.5
        return experiences
    def before(self):
        pass

class SandboxAway(Asks):
    def before(self):
        raise SandboxFailed("connection refused", kind="environment", retryable=False)

class Hangs(Asks):
    def before(self):
        (HERE / "pid").write_text(str(os.getpid()))
        while True:  # on the loop: nothing in this process can stop it
            time.sleep(0.01)

class Spawns(Asks):
    def before(self):
        (HERE / "pid").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
        os._exit(0)

class HoldsOn(Workflow):
    def run(self):
        experiences = self.model.chat([{"role": "user", "content": "q"}])
        while experiences[0].response_text == "hang":
            try:
                time.sleep(0.01)
            except BaseException:
                continue
        return experiences

class HoldsOnToTheLoop(HoldsOn):
    is_async = True
    async def run_async(self):
        return self.run()

class Unsendable(Asks):
    async def run_async(self):
        experiences = await super().run_async()
        experiences[0].info["lock"] = object()
        return experiences

class Raises(Asks):
    def before(self):
        sys.exit("no")

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


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the module of the workflows, which processes find by sys.path."""
    (tmp_path / "isolated_workflows.py").write_text(WORKFLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"model": {"tiny": {}}, "run_dir": str(tmp_path / "run")})


@pytest.fixture
async def pool():
    made = ProcessPool(2, grace=0.5)
    yield made
    await made.close()


@pytest.fixture
async def engine():
    async with scripted_engine() as served:
        yield served


def task_slice(kind, runs=2, **limits):
    limits = {"max_timeout": 30.0, "max_retry_times": 0, "slice_timeout": 30.0, **limits}
    task = TaskBody(workflow=f"isolated_workflows.{kind}", index={"taskset": "t", "index": 1})
    return TaskSlice(batch="3/e", ticket="t", task_id=4, run_base=6, repeat_times=runs, task=task, seed=5, **limits)


@pytest.fixture
async def pid(here):
    """The number that a workflow writes to the pipe ``pid``, awaited."""
    os.mkfifo(here / "pid")

    async def read():
        return int(await asyncio.to_thread((here / "pid").read_text))

    return asyncio.ensure_future(read())


async def ends(number):
    """Wait until the process ``number`` has ended, whether or not its parent has noticed."""
    over = asyncio.Event()
    try:
        watched = os.pidfd_open(number)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, over.set)
    try:
        async with asyncio.timeout(10):
            await over.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


async def test_a_slice_comes_out_as_it_does_in_the_runner(here, pool, config, engine):
    outcome = await pool.run(task_slice("Asks"), config, lambda: engine.model)
    runner = WorkflowRunner(config)
    wanted = await runner.run_slice(task_slice("Asks"), lambda: engine.model)
    await runner.close()
    assert (outcome.runs, outcome.message) == ([6, 7], None)
    assert (outcome.version_min, outcome.version_max) == (wanted.version_min, wanted.version_max) == ((1, 3), (1, 3))
    assert [metrics.keys() for metrics in outcome.metrics] == [metrics.keys() for metrics in wanted.metrics]
    for one, other in zip(outcome.experiences, wanted.experiences, strict=True):
        other.eid.suffix = one.eid.suffix
        assert one == other
    seeds = [request["seed"] for request in engine.requests]
    assert sorted(seeds[:2]) == sorted(seeds[2:])


@pytest.mark.parametrize("kind", ["HoldsOn", "HoldsOnToTheLoop"])
async def test_runs_that_are_finished_outlive_what_hangs(here, pool, config, engine, kind):
    sequential = config.runner.model_copy(update={"concurrent_mode": "sequential"})
    config = config.model_copy(update={"runner": sequential})
    answers = [completion("hang"), completion("8"), completion("7")]
    engine.script = lambda body: answers.pop() if answers else completion("hang")
    results = RunResults()
    running = pool.run(task_slice(kind, runs=3, slice_timeout=1.5), config, lambda: engine.model, results)
    if kind == "HoldsOn":
        await running  # its thread is left behind in the process
    else:
        with pytest.raises(ChildDied, match="was killed"):
            await running
    outcome = results.outcome(2.0)
    assert outcome.runs == [6, 7]
    assert len(outcome.runs) == len(outcome.experiences) == len(outcome.metrics) == 2
    assert {each.response_text for each in outcome.experiences} == {"7", "8"}
    assert outcome.version_min == (1, 3)


@pytest.mark.parametrize(("closes", "error"), [(False, asyncio.CancelledError), (True, ChildDied)])
async def test_cancelling_and_closing_kill_the_process(here, pool, config, engine, pid, closes, error):
    task = asyncio.ensure_future(pool.run(task_slice("Hangs"), config, lambda: engine.model))
    await pid
    if closes:
        await pool.close()
    else:
        task.cancel()
    with pytest.raises(error, match="SIGKILL" if closes else None):
        await task
    await ends(await pid)


async def test_what_a_slice_has_started_dies_with_it(here, pool, config, engine, pid):
    with pytest.raises(ChildDied, match="exit code 0"):
        await pool.run(task_slice("Spawns", runs=1), config, lambda: engine.model)
    await ends(await pid)


async def test_the_process_asks_which_engine_to_use_and_tells_which_did_not_answer(here, pool, config, engine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = InferenceModel(id="gone", url=f"http://127.0.0.1:{server.getsockname()[1]}", name="m")

    class Models:
        def __init__(self):
            self.answers, self.told = [engine.model, gone, EngineNotReady("waits", 0.01), EngineLost("none")], []

        def __call__(self):
            answer = self.answers.pop() if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        def lost(self, model):
            self.told.append(model)

    models = Models()
    outcome = await pool.run(task_slice("Asks", runs=1), config, models)
    assert (outcome.runs, outcome.message, models.told) == ([6], None, [gone])
    assert models.answers == [engine.model]


@pytest.mark.parametrize(
    ("kind", "said", "failure", "retryable"),
    [
        ("Raises", "called sys.exit('no')", "workflow", True),
        ("Unsendable", "do not encode", "workflow", True),
        ("SandboxAway", "environment: connection refused (", "environment", False),
    ],
)
async def test_failures_come_back_as_outcomes(here, pool, config, engine, kind, said, failure, retryable):
    outcome = await pool.run(task_slice(kind), config, lambda: engine.model)
    assert (outcome.runs, outcome.failure_kind, outcome.retryable) == ([], failure, retryable)
    assert said in outcome.message


async def test_no_more_processes_at_a_time_than_allowed(here, config, engine, pid):
    pool = ProcessPool(1)
    first = asyncio.ensure_future(pool.run(task_slice("Hangs"), config, lambda: engine.model))
    await pid
    second = asyncio.ensure_future(pool.run(task_slice("Asks"), config, lambda: engine.model))
    done, _ = await asyncio.wait([second], timeout=0.3)
    assert not done
    first.cancel()
    assert (await second).runs == [6, 7]
    await pool.close()


RUNNER = """
import asyncio, sys
from trinity_mq.config import Config
from trinity_mq.messages import TaskSlice, decode
from trinity_mq.models import InferenceModel
from trinity_agents.runner.process_pool import ProcessPool

async def main():
    config = Config.model_validate({"model": {"tiny": {}}, "run_dir": sys.argv[2]})
    engine = InferenceModel(id="e", url="http://127.0.0.1:1", name="m")
    await ProcessPool(1).run(decode(bytes.fromhex(sys.argv[1]), TaskSlice), config, lambda: engine)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_the_process_does_not_outlive_its_runner(here, config, pid):
    (here / "runner.py").write_text(RUNNER)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    arguments = [str(here / "runner.py"), encode(task_slice("Hangs")).hex(), config.run_dir]
    runner = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environ)
    await pid
    runner.kill()
    await runner.wait()
    await ends(await pid)


# -- a runner and slices that kill, hang or eat: each costs itself only


def poison(kind: str, task: int, **fields: object) -> TaskSlice:
    limits = {"max_timeout": 20.0, "slice_timeout": 20.0, "max_retry_times": 0, **fields}
    body = TaskBody(workflow=f"isolated_workflows.{kind}", raw_task={"n": 0})
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


async def test_each_poisonous_slice_costs_itself_only(here: Path, tmp_path: Path) -> None:
    world = World("broker.delivery_limit=3", "runner.memory_limit=200000000", f"run_dir={tmp_path / 'run'}")
    task_slices = [
        poison("Fine", 0),
        poison("Exits", 1),
        poison("PointsNowhere", 2),
        poison("Eats", 3),
        poison("Ignores", 4, slice_timeout=1.0),
        poison("Fine", 5),
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


async def test_a_blocking_slice_in_a_process_can_be_killed_the_first_time(here: Path, tmp_path: Path) -> None:
    world = World("broker.delivery_limit=2", "runner.blocking=process", f"run_dir={tmp_path / 'run'}")
    task_slices = [poison("Blocks", 0), poison("BlockingExits", 1), poison("BlockingHangs", 2, slice_timeout=1.0)]
    ended = await outcomes(world, 3, *task_slices, returns=0)
    assert ended == {0: "finished", 1: "poisoned", 2: "failed"}


# -- the watchdog


SCRIPT = """
import asyncio, sys, time
from trinity_agents.runner import agent as watchdog
watchdog.TICK = 0.05

async def main():
    watching = asyncio.ensure_future(watchdog.Watchdog(0.5).run())
    await asyncio.sleep(0.8)
    if sys.argv[1] == "blocks":
        def held_here():
            time.sleep(30)
        held_here()
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.wait([watching])
    time.sleep(0.8)  # nobody watches any more

asyncio.run(main())
"""


@pytest.mark.parametrize(("does", "code"), [("blocks", 75), ("ticks", 0)])
async def test_a_process_whose_loop_is_held_ends_and_says_where(does, code):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, does, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(45):  # the child imports what a runner imports
        _, said = await process.communicate()
    assert process.returncode == code
    assert (b"held_here" in said) == (does == "blocks")


# -- in a thread


class HoldsItsThread(Workflow):
    """Synchronous; ends when it is interrupted, and only then."""

    threads: ClassVar[list[threading.Thread]] = []

    def run(self) -> list[Experience]:
        self.threads.append(threading.current_thread())
        while True:
            time.sleep(0.002)


async def test_a_synchronous_workflow_that_nobody_waits_for_frees_its_slot_and_its_thread() -> None:
    world = World("runner.concurrency=1")
    HoldsItsThread.threads.clear()
    runner = Runner(world.config, bus=world.bus(), topology=world.topology, agent_id="runner-0")
    body = TaskBody(workflow=f"{__name__}.HoldsItsThread")
    engine = {"id": "e", "url": "http://127.0.0.1:9", "name": "m", "role": "rollout", "version": [1, 0]}
    async with world.living(runner):
        await world.beat("engine", "e", **engine)
        await send_slice(world, a_slice(opened_beat=10, runs=3).model_copy(update={"task": body}))
        async with asyncio.timeout(10):
            while len(HoldsItsThread.threads) < 3:
                await runner.woken.wait(0.02)
        await world.beat("explorer", "explorer-0", 11, open=[])
        async with asyncio.timeout(10):
            while runner.detail().running:
                await runner.woken.wait(0.02)
        for thread in HoldsItsThread.threads:
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()
    assert results(world) == []
    assert unanswered(world) == 0
