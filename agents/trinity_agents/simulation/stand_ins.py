"""Stand-ins for the engines, workflows, learner and weight channel of a scheduled run. Each sampled token encodes the
weights that the engine really held, independent of the version that the engine reported.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trinity_agents.runner.process_pool import ChildDied
from trinity_agents.simulation.schedule import Settings
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.experience import EID, Experience
from trinity_mq.gateway.recorded_call import RECORDED_SESSIONS
from trinity_mq.messages import TaskSlice, Version
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, VersionMismatch
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import RunFailure, SliceOutcome
from trinity_mq.runtime.notify import Notifier
from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.testing.fakes import FakeChannel, FakeEngine, FakeLearner
from trinity_mq.workflows import Task, TaskError
from trinity_mq.workflows.sessions.recorded import RecordedSessionsWorkflow

TOKENS = 2
"""Number of tokens that a rollout run samples."""
RETRY = 0.2
"""Seconds after which a rollout run that lost its engine retries."""
READY_TIMEOUT = 5.0
"""Seconds for which a request waits for an engine that currently serves nothing."""
UNTRAINED: Version = (0, 0)
"""Stands for weights of no version, which an engine holds after a broken transfer, or if it had no weights to keep."""
PROMPT = (3, 4)
FIRST_TOKEN = 10
STEPS = 1000
"""Upper bound of the train steps of a whole run. A token encodes a generation and a train step."""


def token_of(version: Version) -> int:
    """Return the token that weights of this version sample."""
    return FIRST_TOKEN + version[0] * STEPS + version[1]


def weights_of(token: int) -> Version:
    """Return the version of the weights that sampled a token."""
    generation, step = divmod(token - FIRST_TOKEN, STEPS)
    return generation, step


class SimulatedEngine(FakeEngine):
    """An engine that pauses like a real engine, by ``synchronizer.pause_mode``, and may die or keep its old weights.

    Args:
        engine_id: Id of the engine.
        settings: Settings of the run.
        keeps: Numbers, from 1, of the weight transfers after which the engine keeps its old weights.
    """

    def __init__(self, engine_id: str, settings: Settings, keeps: Collection[int]) -> None:
        super().__init__(engine_id)
        self.snapshot = replace(self.snapshot, url=f"http://127.0.0.1:9/{engine_id}")
        self.held: Version | None = None
        """Version of the weights in the engine's memory. None: no weights."""
        self._mode, self._token_seconds, self._ignored_receives = settings.pause_mode, settings.token_seconds, keeps
        self._life = self._receives = self._aborts = self._requests = self._sampling = 0
        self._changed = Notifier()
        self._working: set[asyncio.Task[Any]] = set()
        """Requests in progress."""
        self._transfer: asyncio.Task[dict[str, Any]] | None = None

    async def generate(self, pinned: Version | None) -> list[tuple[Version, Version]]:
        """Return for each token the version of the weights that sampled the token, and the version stamped on it.

        Raises:
            EngineLost: The engine died, serves nothing, or aborted the request.
            VersionMismatch: The engine serves another version than the request is pinned to.
        """
        # The request belongs to the engine's process, so it continues if the runner that sent it is killed or frozen.
        work = asyncio.get_running_loop().create_task(self._generate(pinned), context=contextvars.Context())
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        try:
            return await asyncio.shield(work)
        finally:
            work.cancel()

    async def end(self) -> None:
        """Cancel the requests that are still in progress, which killed runners have sent."""
        for work in self._working:
            work.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)

    async def _generate(self, pinned: Version | None) -> list[tuple[Version, Version]]:
        life, aborts = self._life, self._aborts
        await self._wait_until_serving(life)
        if pinned is not None and self.snapshot.version != pinned:
            raise VersionMismatch("other weights", pinned, self.snapshot.version)
        self._requests += 1
        try:
            sampled = []
            for _ in range(TOKENS):
                if self._mode == "keep":
                    await self._wait_until_serving(life)
                self._sampling += 1
                try:
                    await asyncio.sleep(self._token_seconds)
                finally:
                    self._sampling -= 1
                    self._changed.notify()
                stamp, held = self.snapshot.version, self.held
                if life != self._life or aborts != self._aborts or stamp is None or held is None:
                    raise EngineLost(f"{self.snapshot.id} gave the request up")
                sampled.append((held, stamp))
            return sampled
        finally:
            self._requests -= 1
            self._changed.notify()

    async def _wait_until_serving(self, life: int) -> None:
        """Wait until the engine serves. Raise EngineLost if it does not serve in time, or dies."""
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                await self._changed.until(
                    lambda: life != self._life or (not self.paused and self.snapshot.version is not None)
                )
        except TimeoutError:
            raise EngineLost(f"{self.snapshot.id} serves nothing") from None
        if life != self._life or not self.snapshot.alive:
            raise EngineLost(f"{self.snapshot.id} is dead")

    async def pause(self, timeout: float) -> None:
        """Pause. Requests finish first (``wait``), are aborted (``abort``), or stop between tokens (``keep``)."""
        self.paused = True
        if self._mode == "abort":
            self._aborts += 1
        async with asyncio.timeout(timeout):
            await self._changed.until(lambda: not (self._requests if self._mode == "wait" else self._sampling))

    async def receive(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Receive weights, one transfer at a time and only while paused, like a real engine."""
        if not self.paused:
            raise ReceiveFailed("the engine is not paused", 409, "not_paused", touched=False)
        if self._transfer is not None and not self._transfer.done():
            raise ReceiveFailed("a transfer is in progress", 409, "busy", touched=False)
        work = asyncio.get_running_loop().create_task(
            self._receive_weights(spec, timeout), context=contextvars.Context()
        )
        self._transfer = work
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()  # needed if the caller is cancelled: a real engine ends the transfer too
        if work.cancelled():
            raise ReceiveFailed("the transfer was aborted", 409, "receive_aborted", touched=True)
        return work.result()

    async def _receive_weights(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Receive weights. In the transfers of ``keeps`` the engine keeps its old weights instead, and its canary
        scores show it.

        Raises:
            ReceiveFailed: The engine died, or the transfer broke.
        """
        life = self._life
        self._receives += 1
        answer = await super().receive(spec, timeout)
        if life != self._life:
            raise ReceiveFailed(f"{self.snapshot.id} died", 500, None, touched=True)
        if spec.get("broken"):
            self.held = UNTRAINED
            raise ReceiveFailed("the transfer broke", 500, None, touched=True)
        if self._receives in self._ignored_receives:
            self.held = self.held or UNTRAINED
            return {"logprobs": [-1.0] * len(answer["logprobs"])}
        generation, step = spec["version"]
        self.held = generation, step
        return answer

    async def commit(self, version: Version, progress: int) -> None:
        """Serve the version."""
        await super().commit(version, progress)
        self._changed.notify()

    async def resume(self) -> None:
        """Cancel a running transfer. Serve the previous version again if it is untouched."""
        if self._transfer is not None:
            self._transfer.cancel()
            await asyncio.wait({self._transfer})
        await super().resume()
        self._changed.notify()

    def die(self) -> None:
        """Kill the engine's process."""
        self._life += 1
        self.held, self.paused, self._received = None, False, None
        self.snapshot = replace(self.snapshot, alive=False, state="loading", version=None)
        self._changed.notify()
        self.on_change()

    def restart(self) -> None:
        """Restart the engine's process, without weights."""
        self.snapshot = replace(self.snapshot, alive=True, state="empty")
        self.on_change()


class SimulatedChannel(FakeChannel):
    """A weight channel with broken broadcasts.

    Args:
        breaks: Numbers, from 1, of the offers whose broadcasts break.
    """

    def __init__(self, breaks: Collection[int]) -> None:
        super().__init__()
        self._breaks, self._offers = breaks, 0

    async def offer(self, version: Version, tensors: Any, manifest: Any) -> dict[str, Any]:
        """Return the description of a broadcast, with a mark if it will break."""
        self._offers += 1
        return {"method": "fake", "broken": self._offers in self._breaks}

    async def broadcast(self, tensors: Any, manifest: Any, epoch: int, attempt: int, world: int) -> None:
        """Sleep for the duration of a broadcast; then raise ChannelError if the broadcast breaks."""
        broken = self._offers in self._breaks
        await super().broadcast(tensors, manifest, epoch, attempt, world)
        if broken:
            raise ChannelError("the broadcast broke")


class SimulatedLearner(FakeLearner):
    """A learner that passes fault points at the end of a step and at the beginning of a save, and is killed by deadly
    batches.

    Args:
        step_seconds: Seconds of a step.
        point: Passes a fault point, at which the process may be killed.
        deadly: Batches whose steps kill the process.
        die: Kills the process.
    """

    def __init__(
        self,
        step_seconds: float,
        point: Callable[[str], Awaitable[None]],
        deadly: Collection[int],
        die: Callable[[], None],
    ) -> None:
        super().__init__(step_seconds)
        self._point, self._deadly, self._die = point, deadly, die

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Sleep for the duration of a step; then kill the process if the step has a deadly batch, and pass a fault
        point.
        """
        metrics = await super().step(experiences, step_number)
        if self._deadly and any(experience.eid.batch in self._deadly for experience in experiences):
            self._die()
        await self._point("in a step")
        return metrics

    async def save(self, folder: Path) -> None:
        """Pass a fault point, then write a file, so that a checkpoint exists."""
        await self._point("in a save")
        await super().save(folder)


class FakeWorkflowRunner:
    """Stand-in for WorkflowRunner and ProcessPool. It samples each rollout run from an engine and fails as the schedule
    determines.

    Args:
        seed: Seed of the schedule. The same rollout runs fail on each attempt.
        settings: Settings of the simulated run.
        engines: Engines by id.
        is_away: Returns whether the sandbox is unavailable.
        dice: Draws durations and crashes.
        is_pool: True for the stand-in of ProcessPool, whose workflows run in child processes.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        engines: dict[str, SimulatedEngine],
        is_away: Callable[[], bool],
        dice: random.Random,
        is_pool: bool = False,
    ) -> None:
        self._seed, self._settings, self._engines = seed, settings, engines
        self._is_sandbox_down, self._dice, self._is_pool = is_away, dice, is_pool
        self.cut_short: set[tuple[str, int, int, frozenset[int]]] = set()
        """Attempts that lack runs although no workflow failed: cancelled, timed out, without a sandbox, or on other
        weights.

        Each entry is (ticket, task and first run of the slice, set of finished runs). A result cannot replace this
        record because it names only the first failure, which may be a workflow failure.
        """

    def fails(self, batch: object, task: int, run: int) -> bool:
        """Return whether the workflow of this rollout run fails. The answer is the same on each attempt."""
        return random.Random(f"{self._seed}/{batch}/{task}/{run}").random() < self._settings.failing

    async def run_slice(
        self, task_slice: TaskSlice, models: Callable[[], InferenceModel], results: RunResults | None = None
    ) -> SliceOutcome:
        """Execute the runs of a slice in sequence, within the slice's time limit.

        Raises:
            ChildDied: Drawn by lot, if this is the stand-in of ProcessPool.
        """
        results = RunResults() if results is None else results
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(task_slice.slice_timeout):
                await asyncio.sleep(self._dice.choice([0.0, 0.0, 0.1, 1.0]))
                if self._is_pool and self._dice.random() < self._settings.crashing:
                    raise ChildDied("its process was killed by lot")
                runs = range(task_slice.run_base, task_slice.run_base + task_slice.repeat_times)
                if not all([await self._run(task_slice, run, models, results) for run in runs]):
                    self._note_cut_short(task_slice, results)
        except asyncio.CancelledError:
            self._note_cut_short(task_slice, results)
            raise
        except TimeoutError:
            results.failure = RunFailure(f"not done within the {task_slice.slice_timeout:g} s of the slice", "timeout")
            self._note_cut_short(task_slice, results)
        return results.outcome(loop.time() - started)

    def _note_cut_short(self, task_slice: TaskSlice, results: RunResults) -> None:
        done = frozenset(results.experiences)
        self.cut_short.add((task_slice.ticket, task_slice.task_id, task_slice.run_base, done))

    async def run(
        self,
        task_slice: TaskSlice,
        config: object,
        models: Callable[[], InferenceModel],
        results: RunResults | None = None,
    ) -> SliceOutcome:
        """Execute a slice like a ProcessPool."""
        return await self.run_slice(task_slice, models, results)

    def blocks(self, task_slice: TaskSlice) -> bool:
        """Return False: no workflow is synchronous."""
        return False

    async def close(self) -> None:
        """Do nothing."""

    async def _run(
        self, task_slice: TaskSlice, run: int, models: Callable[[], InferenceModel], results: RunResults
    ) -> bool:
        """Execute one run of a slice. Return False if it failed for another reason than its workflow."""
        if self._is_sandbox_down():
            results.add_failure(RunFailure("the sandbox is away", "sandbox"))
            return False
        if task_slice.task.workflow == RECORDED_SESSIONS:
            return await self._recorded(task_slice, run, results)
        is_training = task_slice.lane == "train"
        if is_training and self.fails(task_slice.batch, task_slice.task_id, run):
            results.add_failure(RunFailure("the workflow failed by lot", "workflow"))
            return True
        while True:
            try:
                sampled = await self._engines[models().id].generate(task_slice.pinned)
            except EngineLost:
                await asyncio.sleep(RETRY)
            except VersionMismatch as error:
                results.add_failure(RunFailure(str(error), "engine", retryable=False))
                return False
            else:
                break
        results.keep(run, [experience_of(task_slice, run, sampled)], {"reward": float(run % 2), "accuracy": 1.0})
        return True

    async def _recorded(self, task_slice: TaskSlice, run: int, results: RunResults) -> bool:
        """Execute one run of a slice whose task has recorded sessions: make the experiences of the session ``run`` by
        the real workflow. Return True.
        """
        no_model: Any = None
        workflow = RecordedSessionsWorkflow(
            task=Task.from_body(task_slice.task, task_slice.batch, task_slice.task_id), model=no_model
        )
        workflow.set_repeat_times(1, run)
        try:
            experiences = await workflow.run_async()
        except TaskError as error:
            results.add_failure(RunFailure(str(error), "workflow"))
            return True
        for experience in experiences:
            experience.eid.batch, experience.eid.task = task_slice.batch, task_slice.task_id
        results.keep(run, experiences, {"reward": float(experiences[-1].reward or 0.0)})
        return True


def experience_of(task_slice: TaskSlice, run: int, sampled: Sequence[tuple[Version, Version]]) -> Experience:
    """Return the experience of one run of a slice. Its reward is the parity of the run's number.

    Args:
        task_slice: The slice.
        run: Number of the run.
        sampled: For each token, the version of the weights that sampled the token, and the version stamped on it.
    """
    versions: list[tuple[int, int, int]] = []
    for position, (_, stamp) in enumerate(sampled):
        if not versions or versions[-1][1:] != stamp:
            versions.append((position, *stamp))
    return Experience(
        eid=EID(batch=task_slice.batch, task=task_slice.task_id, run=run),
        tokens=torch.tensor([*PROMPT, *(token_of(held) for held, _ in sampled)], dtype=torch.int32),
        prompt_length=len(PROMPT),
        logprobs=torch.zeros(len(sampled)),
        reward=float(run % 2),
        versions=versions,
        temperature=1.0,
    )
