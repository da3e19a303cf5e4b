"""A sandbox that is away for a while: whole runs on MemoryBus in virtual time, with real runners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.agents.world import failure
from trinity_agents.runner.agent import Runner
from trinity_agents.simulation import Simulation
from trinity_agents.trainer.history import lineage
from trinity_mq.experience import Experience
from trinity_mq.messages import RunnerStatus, TaskBody, TaskResult, TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.fakes import small_experience
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import SandboxFailed, Workflow

MINUTE = 60.0
TASKS = 6
BATCHES = 4
SETTINGS = (
    f"buffer.batch_size={TASKS}",
    "explorer.max_timeout=30",
    "explorer.batch_timeout=90",
    "explorer.eval_timeout=90",
    "explorer.stall_timeout=3600",
)


pytestmark = pytest.mark.usefixtures("logs")


class Sandboxed(Workflow):
    """Asks a sandbox for each run."""

    is_async = True
    is_up: ClassVar[Callable[[], bool]]
    version: ClassVar[Callable[[], Any]]
    seconds: ClassVar[float] = 1.0
    asked: ClassVar[list[float]]

    async def run_async(self) -> list[Experience]:
        self.asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.seconds)
        if not type(self).is_up():
            raise SandboxFailed("connection refused")
        task_slice = TaskSlice(batch=self.task.batch_id, ticket="", task_id=self.task.task_id, task=self.task.to_body())
        return [small_experience(task_slice, 0, type(self).version())]


class InSandbox(WorkflowRunner):
    """Executes every task by that workflow."""

    async def run_slice(
        self, task_slice: TaskSlice, models: Callable[[], InferenceModel], results: RunResults | None = None
    ) -> SliceOutcome:
        task = task_slice.task.model_copy(update={"workflow": f"{__name__}.{Sandboxed.__name__}"})
        return await super().run_slice(task_slice.model_copy(update={"task": task}), models, results)


class Outage(Simulation):
    """A run whose sandbox is away from one time to another, with so many real runners."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.eval_sets = {"held": [TaskBody(workflow="none", is_eval=True)] * 3}

    def begin(self, away: float, back: float, runners: int = 2) -> Any:
        self.real: list[Runner] = []
        clock = lambda: asyncio.get_running_loop().time()  # noqa: E731
        Sandboxed.is_up = lambda: not away <= clock() < back
        Sandboxed.version = lambda: self.engine.snapshot.version
        Sandboxed.asked = []

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(runners):
                    runner = Runner(
                        self.config,
                        bus=self.bus(),
                        topology=self.topology,
                        agent_id=f"runner-{number}",
                        workflows=InSandbox(self.config),
                    )
                    self.real.append(runner)
                    group.create_task(runner.run())

        return self.run(runners=work)

    def trained(self) -> list[str]:
        """Return the uids of what was trained on, in order."""
        entries = lineage(self.folder / "history", 1, self.batches)
        return [uid for entry in entries for uid in entry["uids"]]


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("away", [0.0, 4.0, 7.0])
@pytest.mark.parametrize("minutes", [1, 4])
def test_a_sandbox_that_is_away_for_minutes_costs_no_task(
    tmp_path: Path, away: float, minutes: int, runners: int, logs: list[Any]
) -> None:
    """Batches and evaluations of 90 s wait for it, though it is away for longer than that."""
    sim = Outage(tmp_path, SETTINGS, batches=BATCHES)
    run_virtually(sim.begin(away, away + minutes * MINUTE, runners), limit=3600)
    assert sim.learners[0].steps == list(range(1, BATCHES + 1))
    uids = sim.trained()
    assert len(uids) == len(set(uids)) == BATCHES * TASKS * 2
    assert {result.outcome for result in sim.published(TaskResult)} == {"finished"}
    assert sim.evaluated_steps() == [0, 2, 4]
    assert [values for _, values in sim.values("rollout/failures/sandbox")] == [0.0] * BATCHES
    events = [entry["event"] for entry in logs]
    assert "lane_paused" in events
    assert "lane_resumed" in events
    assert sum(values for _, values in sim.values("rollout/lane_pauses")) >= 1
    # it is not hammered meanwhile: a row of failures in each lane of each runner, then ever fewer probes
    hammered = [time for time in Sandboxed.asked if away <= time < away + minutes * MINUTE]
    assert len(hammered) < 2 * runners * (2 * TASKS + 8 * 2 * 3 + 10 * 3 * 2)
    assert sim.dead_letters() == []


def test_the_heartbeat_says_what_a_runner_waits_for(tmp_path: Path) -> None:
    sim = Outage(tmp_path, (*SETTINGS, "explorer.eval_on_startup=false"), batches=1)
    seen: list[tuple[str, str | None, RunnerStatus]] = []

    async def look() -> None:
        await asyncio.sleep(60.0)
        seen.extend((runner.state, runner.waits_for, runner.detail()) for runner in sim.real)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sim.begin(0.0, 120.0, runners=1))
            group.create_task(look())

    run_virtually(both(), limit=1000)
    ((state, waits_for, detail),) = seen
    assert state in {"holding", "working"}
    assert waits_for is not None
    assert waits_for.startswith("the sandbox of the train lane: the last ")
    assert "tries of slices failed (sandbox: connection refused (" in waits_for
    assert "test_sandbox_outage.py:" in waits_for
    assert waits_for.endswith(" s")
    assert [one.lane for one in detail.paused] == ["train"]
    assert detail.pauses == 1
    assert all(one.waits_for is None for one in sim.real), "it is over"


def test_one_that_never_comes_back_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    sim = Outage(tmp_path, (*SETTINGS, "explorer.stall_timeout=1200"), batches=BATCHES)
    error = failure(sim.begin(7.0, 1e9), FatalError, limit=7200)
    assert isinstance(error, FatalError)
    assert "nothing has moved for 1201 s (explorer.stall_timeout)" in str(error)
    assert "the runners wait for the sandbox of the train lane: the last" in str(error)
    assert "runner.circuit_breaker.enable=false" in str(error)
    assert {result.outcome for result in sim.published(TaskResult)} == {"finished"}
