"""Fakes of an engine, a learner and runners, for whole runs on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trinity_mq.bus import Bus, Envelope, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import TaskResult, TaskSlice, Version, decode
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.inference import EngineSnapshot
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import EXPERIENCES, acknowledge, envelope
from trinity_mq.training.checkpoints.checkpoint import Writer

ENGINE_RETRY = 0.01
"""Seconds until a fake runner checks again whether the engine has weights."""


class FakeEngine:
    """A fake engine that accepts any weights and records every version that it served."""

    def __init__(self, engine_id: str = "engine", receive_seconds: float = 0.01) -> None:
        self.snapshot = EngineSnapshot(engine_id, alive=True, state="empty", url="http://127.0.0.1:9", name="fake")
        self.served: list[Version] = []
        self.paused = False
        """Whether requests are held: True between the start and the end of a sync."""
        self.receive_seconds = receive_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._received: Version | None = None

    async def start(self) -> None:
        """Do nothing."""

    async def hold(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    async def keep(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Do nothing."""

    async def detach(self) -> None:
        """Do nothing."""

    async def pause(self, timeout: float) -> None:
        """Pause at once."""
        self.paused = True

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Receive weights. The engine does not have a version until :meth:`commit`. The returned canary logprobs match
        :class:`FakeLearner`.
        """
        self.snapshot = replace(self.snapshot, state="dirty", version=None)
        await asyncio.sleep(self.receive_seconds)
        generation, step = spec["version"]
        self._received = generation, step
        return {"logprobs": [0.0] * (len(spec["canary"]["tokens"]) - 1)}

    async def commit(self, version: Version, progress: int) -> None:
        """Serve the version.

        Raises:
            EngineRefused: The version was neither received nor is it served, as in a real engine.
        """
        if version not in (self._received, self.snapshot.version):
            raise EngineRefused(f"cannot commit version {version}, received was {self._received}", 409)
        self.snapshot = replace(self.snapshot, state="current", version=version, progress=progress)
        self.paused, self._received = False, None
        self.served.append(version)

    async def resume(self) -> None:
        """End the pause, and forget received weights that were not committed."""
        self.paused, self._received = False, None


class FakeChannel:
    """A weight channel whose broadcast takes time and moves no data."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds

        self.kept: Any = None
        """The return value of :meth:`catch_up_source`."""
        self.can_pull = True

    async def offer(self, version: Version, tensors: Any, manifest: Any) -> dict[str, Any]:
        """Return a description without an address."""
        return {"method": "fake"}

    async def committed(self, version: Version, tensors: Any, manifest: Any) -> None:
        """Store the version for :meth:`catch_up_source`."""
        self.kept = (version, {"method": "fake"}, manifest) if self.can_pull else None

    async def catch_up_source(self) -> Any:
        """Return the last committed version with its description and its manifest. Return None before the first commit,
        or if ``can_pull`` was False at the last commit.
        """
        return self.kept

    async def close(self) -> None:
        """Do nothing."""

    async def broadcast(self, tensors: Any, manifest: Any, epoch: int, attempt: int, world: int) -> None:
        """Sleep for the duration of a broadcast."""
        await asyncio.sleep(self.seconds)

    def abandon(self) -> None:
        """Do nothing."""


class FakeLearner:
    """A fake learner that records the numbers of its training steps."""

    def __init__(self, step_seconds: float = 1.0) -> None:
        self.step_seconds = step_seconds
        self.steps: list[int] = []

    async def open(self, checkpoint: Path | None) -> None:
        """Do nothing."""

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Sleep for the duration of a step, and record its number."""
        await asyncio.sleep(self.step_seconds)
        self.steps.append(step_number)
        return {"actor/optimizer_steps": 1.0}

    async def save(self, folder: Path) -> None:
        """Write a file, so that a checkpoint exists."""
        (folder / "weights").write_text("none")

    async def stage(self) -> Writer:
        """Return the function that writes the checkpoint."""
        return self.save

    async def export(self, folder: Path) -> None:
        """Do nothing."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return no tensors."""
        return []

    async def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return no tensors."""
        return []

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return zeros."""
        return [0.0] * (len(tokens) - 1)

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class FakeRunner:
    """Runs task slices from a bus: after ``seconds``, and once ``version`` is not None, ``make`` creates one experience
    for each run, if the slice wants experiences. Then it publishes the result.

    ``spoil`` returns the fate of a slice: ``None`` (finished), ``"failed"`` (failed, with a message) or another text
    (failed, without a message). A failed slice has no runs and no experiences. ``name`` is the runner's id in the
    results. ``done`` receives each executed slice; pass ``deque(maxlen=0)`` for a long run of the system.
    """

    bus: Bus
    topology: Topology
    version: Callable[[], Version | None]
    seconds: Callable[[TaskSlice], float] = lambda task_slice: 0.1
    spoil: Callable[[TaskSlice], str | None] = lambda task_slice: None
    done: MutableSequence[TaskSlice] = field(default_factory=list)
    name: str = "runner-0"
    make: Callable[[TaskSlice, int, Version], Experience] = field(default_factory=lambda: small_experience)
    answer: Callable[[TaskSlice], str] = lambda task_slice: ""
    """Returns the answer that all runs of an evaluation's slice have."""

    async def run(self) -> None:
        """Consume task slices until cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in (self.topology.tasks_train, self.topology.tasks_eval):
                group.create_task(self._consume(queue, group))

    async def _consume(self, queue: Any, group: asyncio.TaskGroup) -> None:
        async with await self.bus.consume(queue, prefetch=64) as subscription:
            async for delivery in subscription:
                group.create_task(self._slice(delivery))

    async def _slice(self, delivery: Any) -> None:
        task_slice = decode(delivery.body, TaskSlice)
        await asyncio.sleep(self.seconds(task_slice))
        attempt, spoiled = uuid.uuid4().hex, self.spoil(task_slice)
        while (version := self.version()) is None:  # noqa: ASYNC110  # a fake engine does not notify
            await asyncio.sleep(ENGINE_RETRY)
        runs = [] if spoiled else list(range(task_slice.run_base, task_slice.run_base + task_slice.repeat_times))
        parts = 0
        if runs and task_slice.deliver != "none":
            body = Experience.serialize_many([self.make(task_slice, run, version) for run in runs])
            key = self.topology.batch_routing_key(task_slice.batch, task_slice.ticket)
            headers: dict[str, Any] = {"attempt": attempt, "part": 0, "ticket": task_slice.ticket}
            message = Envelope(body=body, kind="experience_part", content_type=EXPERIENCES, headers=headers)
            parts = int(await self.bus.publish(self.topology.exchange("experiences"), key, message))
        result = TaskResult(
            batch=task_slice.batch,
            ticket=task_slice.ticket,
            task_id=task_slice.task_id,
            run_base=task_slice.run_base,
            repeat_times=task_slice.repeat_times,
            attempt=attempt,
            outcome="failed" if spoiled else "finished",
            runs=runs,
            parts=parts,
            metrics=[{"accuracy": 1.0, "reward": 1.0} for _ in runs],
            answers=[self.answer(task_slice) for _ in runs] if task_slice.lane == "eval" else [],
            message="spoilt" if spoiled == "failed" else None,
            runner=self.name,
            version_min=version,
            version_max=version,
        )
        await self.bus.publish(self.topology.exchange("results"), batch_key(task_slice.batch), envelope(result))
        self.done.append(task_slice)
        await acknowledge(delivery)


def small_experience(task_slice: TaskSlice, run: int, version: Version) -> Experience:
    """Return a small experience of a run, with reward 0 for an even run number and 1 for an odd run number."""
    return Experience(
        eid=EID(batch=task_slice.batch, task=task_slice.task_id, run=run),
        tokens=torch.tensor([3, 4, 5, 1], dtype=torch.int32),
        prompt_length=2,
        logprobs=torch.zeros(2),
        reward=float(run % 2),
        versions=[(0, *version)],
        temperature=1.0,
    )


class FakeRunnerAgent(Agent):
    """A runner agent whose work is the coroutine of ``work``, such as :meth:`FakeRunner.run`. Its heartbeats show
    timeouts a living runner.
    """

    role = "runner"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str,
        work: Callable[[Bus, Topology], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._work = work

    async def serve(self) -> None:
        """Work until the explorer has finished or this agent drains."""
        over = self.woken.until(lambda: self.draining.is_set() or self.peers.explorer.finished)
        await self.run_with_background(over, self._work(self.bus, self.topology))
