"""``runner.concurrent_mode``: how the runs of a slice are done."""

import asyncio
import threading
from typing import ClassVar

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from tests.unit.rollout.scripted_engine import scripted_engine
from trinity_mq.config import Config
from trinity_mq.messages import TaskBody, TaskSlice
from trinity_mq.rollout import attempts
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.workflows import Workflow

THIS = __name__


def config(mode):
    return Config.model_validate(
        {
            "model": {"tiny": {}},
            "runner": {"concurrent_mode": mode},
            "explorer": {"rollout_model": {"enable_history": True}},
        }
    )


def task_slice(kind, runs=3, **limits):
    limits = {"max_timeout": 10.0, "max_retry_times": 1, "slice_timeout": 20.0, "deliver": "caller", **limits}
    task = TaskBody(workflow=f"{THIS}.{kind}", raw_task={"question": "q"})
    return TaskSlice(batch=1, ticket="t", task_id=0, repeat_times=runs, task=task, seed=3, **limits)


@pytest.fixture
async def engine():
    async with scripted_engine() as served:
        yield served


@pytest.fixture
def ran(engine, monkeypatch):
    """Runs a slice in a mode."""
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.01)
    Noted.reset_all()

    async def run(mode, kind, **fields):
        runner = WorkflowRunner(config(mode))
        with capture_logs():
            try:
                return await runner.run_slice(task_slice(kind, **fields), lambda: engine.model)
            finally:
                await runner.close()

    return run


class Noted(Workflow):
    """Notes who does what, and how many at a time."""

    is_async = True
    instances: ClassVar[list] = []
    resets: ClassVar[list] = []
    loops: ClassVar[set] = set()
    histories: ClassVar[list] = []
    at_work: ClassVar[int] = 0
    most: ClassVar[int] = 0
    question = "q"

    @classmethod
    def reset_all(cls):
        for noted in (Noted.instances, Noted.resets, Noted.histories):
            noted.clear()
        Noted.loops.clear()
        Noted.at_work = Noted.most = 0

    def __init__(self, **given):
        super().__init__(**given)
        self.instances.append(self)
        self.client = self.model.get_openai_async_client()

    def begin(self):
        Noted.at_work += 1
        Noted.most = max(Noted.most, Noted.at_work)

    async def run_async(self):
        self.begin()
        self.loops.add((asyncio.get_running_loop(), threading.current_thread()))
        assert self.task.raw_task == {"question": self.question}
        self.task.raw_task["question"] = "spoilt"
        await asyncio.sleep(0.02)
        try:
            await self.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
            self.histories.append(len(self.model.extract_experience_from_history(clear_history=False)))
            return self.model.extract_experience_from_history(clear_history=False)
        finally:
            Noted.at_work -= 1


class Resets(Noted):
    can_reset = True

    def reset(self, task):
        self.task = task
        self.resets.append(self)


class FailsSecond(Resets):
    async def run_async(self):
        if len(self.resets) == 1 and len(self.instances) == 1:
            raise ArithmeticError("once")
        return await super().run_async()


class Blocks(Workflow):
    at_work: ClassVar[threading.Barrier] = threading.Barrier(3, timeout=5)

    def run(self):
        self.at_work.wait()
        return self.model.chat([{"role": "user", "content": "q"}])


class BlocksItsLoop(Workflow):
    is_async = True

    async def run_async(self):
        Blocks.at_work.wait()
        return await self.model.chat_async([{"role": "user", "content": "q"}])


async def test_sequential_runs_are_done_one_after_the_other_by_one_instance(ran, engine):
    outcome = await ran("sequential", "Resets")
    assert (outcome.runs, outcome.message) == ([0, 1, 2], None)
    assert (len(Noted.instances), len(Noted.resets), Noted.most) == (1, 2, 1)
    assert Noted.histories == [1, 1, 1]  # each run sees its own only
    assert len({request["seed"] for request in engine.requests}) == 3


async def test_sequential_slices_share_an_instance_which_is_reset_to_each_task(engine):
    Noted.reset_all()
    runner = WorkflowRunner(config("sequential"))
    for record in ("q", "other", "q"):
        Resets.question = record
        one = task_slice("Resets", runs=2)
        task = one.task.model_copy(update={"raw_task": {"question": record}, "rollout_args": {"top_k": len(record)}})
        outcome = await runner.run_slice(one.model_copy(update={"task": task}), lambda: engine.model)
        assert (outcome.runs, outcome.message) == ([0, 1], None)
    await runner.close()
    assert (len(Noted.instances), len(Noted.resets)) == (1, 5)
    assert Noted.histories == [1] * 6
    assert [request["top_k"] for request in engine.requests] == [1, 1, 5, 5, 1, 1]


async def test_asynchronous_slices_share_no_instance(engine):
    Noted.reset_all()
    runner = WorkflowRunner(config("asynchronous"))
    for _ in range(2):
        await runner.run_slice(task_slice("Resets", runs=1), lambda: engine.model)
    await runner.close()
    assert (len(Noted.instances), Noted.resets) == (2, [])


async def test_sequential_runs_of_what_cannot_be_reset_have_instances_of_their_own(ran):
    outcome = await ran("sequential", "Noted")
    assert outcome.runs == [0, 1, 2]
    assert (len(Noted.instances), Noted.most) == (3, 1)


async def test_an_instance_whose_run_failed_is_not_used_again(ran):
    outcome = await ran("sequential", "FailsSecond")
    assert outcome.runs == [0, 1, 2]
    assert "ArithmeticError: once" in outcome.message
    assert len(Noted.instances) == 2
    assert Noted.resets == [Noted.instances[0], Noted.instances[1]]


async def test_sequential_runs_that_are_done_outlive_the_time_of_the_slice(ran, engine):
    async def third_hangs(body):
        if len(engine.requests) == 3:
            await asyncio.Event().wait()

    engine.script = third_hangs
    outcome = await ran("sequential", "Resets", slice_timeout=1.0)
    assert outcome.runs == [0, 1]
    assert outcome.message == "not done within the 1 s of the slice"


async def test_asynchronous_runs_are_done_all_at_once_on_one_loop(ran):
    outcome = await ran("asynchronous", "Resets")
    assert outcome.runs == [0, 1, 2]
    assert (len(Noted.instances), Noted.most, len(Noted.loops), Noted.resets) == (3, 3, 1, [])
    assert Noted.histories == [1, 1, 1]


async def test_multi_threading_runs_have_threads_and_loops_of_their_own(ran):
    outcome = await ran("multi-threading", "Resets")
    assert (outcome.runs, outcome.message) == ([0, 1, 2], None)
    assert (len(Noted.instances), len(Noted.loops)) == (3, 3)
    assert asyncio.get_running_loop() not in {loop for loop, _ in Noted.loops}


@pytest.mark.parametrize(
    ("mode", "kind"), [("asynchronous", "Blocks"), ("multi-threading", "Blocks"), ("multi-threading", "BlocksItsLoop")]
)
async def test_what_blocks_is_done_in_parallel(ran, mode, kind):
    """Each run waits in its thread for two others: one that held the event loop would wait for them until it failed."""
    Blocks.at_work.reset()
    outcome = await ran(mode, kind)
    assert (outcome.runs, outcome.message) == ([0, 1, 2], None)


def test_any_other_mode_is_an_error():
    with pytest.raises(ValidationError, match="'sequential', 'asynchronous' or 'multi-threading'"):
        config("parallel")
