"""A runner on MemoryBus in virtual time whose workflows are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.unit.agents.world import World, an_outcome, send_slice
from trinity_agents.runner.agent import Runner
from trinity_mq.messages import TaskResult, TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import SliceOutcome

Does = Callable[[TaskSlice], Awaitable[SliceOutcome]]
Models = Callable[[], InferenceModel]


async def at_once(task_slice: TaskSlice) -> SliceOutcome:
    return an_outcome(task_slice)


async def forever(task_slice: TaskSlice) -> SliceOutcome:
    await asyncio.Event().wait()
    raise AssertionError


def taking(seconds: float) -> Does:
    """Return work that finishes after ``seconds``."""

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(seconds)
        return an_outcome(task_slice)

    return work


class Scripted:
    """Replaces WorkflowRunner and ProcessPool; ``ran`` lists the slices as (ticket, task)."""

    def __init__(self, does: Does) -> None:
        self.does = does
        self.ran: list[tuple[str, int]] = []
        self.models: Models

    async def run_slice(self, task_slice: TaskSlice, models: Models, results: RunResults | None = None) -> SliceOutcome:
        self.ran.append((task_slice.ticket, task_slice.task_id))
        self.models = models
        return await self.does(task_slice)

    async def run(self, task_slice: TaskSlice, config: object, models: Models, results: RunResults) -> SliceOutcome:
        return await self.run_slice(task_slice, models)

    async def close(self) -> None:
        """Nothing to close."""


class ScriptedRunner(Runner):
    """Runner that executes slices ``here``, and slices with a suspect earlier delivery ``apart``."""

    def __init__(self, world: World, here: Any, apart: Any, name: str, **limits: Any) -> None:
        self.here, self.apart = here, apart
        super().__init__(
            world.config,
            bus=world.bus(),
            topology=world.topology,
            agent_id=name,
            workflows=here,
            isolated=apart,
            **limits,
        )


def make(
    world: World, does: Does = at_once, isolated: Does = at_once, name: str = "runner-0", **limits: Any
) -> ScriptedRunner:
    return ScriptedRunner(world, Scripted(does), Scripted(isolated), name, **limits)


async def lived(world: World, runner: Runner, *slices: TaskSlice, seconds: float = 1) -> None:
    """Send slices, and run the runner for ``seconds`` of virtual time."""
    for task_slice in slices:
        await send_slice(world, task_slice)
    async with world.living(runner):
        await asyncio.sleep(seconds)


async def suspected(world: World, *slices: TaskSlice, returned: int = 1, failed: int = 0) -> None:
    """Send slices that came back so often, after so many attempts that were seen to fail."""
    for task_slice in slices:
        await send_slice(world, task_slice)
    world.held_back("tasks.train", returned, failed=failed)


def results(world: World) -> list[TaskResult]:
    return [each for each in world.stream("results") if isinstance(each, TaskResult)]


def unanswered(world: World) -> int:
    """Return the number of slices in the queues once nobody consumes."""
    return world.count("tasks.train") + world.count("tasks.eval")  # type: ignore[operator]


def parts(world: World, ticket: str = "t1") -> list[Any]:
    return world.stored(f"batch.{ticket}")
