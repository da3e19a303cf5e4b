"""The trainer: processed batches in, train steps, checkpoints out; leads the weight sync.

Waits for: the next batch on ``ready``, a member to give weights to, and at the end the explorer's last evaluation. One
closed batch is one unit of progress, whatever is left in it.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import structlog

from trinity_agents.trainer.batch_result import BatchResult, skipped_batch_dead_letter, train_on
from trinity_agents.trainer.chunk_blobs import ChunkBlobs
from trinity_agents.trainer.history import History
from trinity_agents.trainer.source import StreamSource, TrainBatch
from trinity_mq.bus import Bus, Lock, LockHeld, Topology
from trinity_mq.config import Config
from trinity_mq.dispatch.pacing import Boundary, sync_due
from trinity_mq.messages import ExplorerStatus, Progress, SyncEvent, TrainerStatus
from trinity_mq.models import ensure_model_folder, fingerprint
from trinity_mq.runtime.agent import HEARTBEAT_INTERVAL, Agent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.locks import ensure_held
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.gate.coordinator_driver import CoordinatorDriver
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.training.checkpoint import CheckpointStore, StepAttempts, TrainerState, publish_final
from trinity_mq.training.learner import MODEL_FOLDER, Learner, TorchLearner
from trinity_mq.transport.blobs import open_store

log = structlog.get_logger(__name__)

LOCK_RETRY = 2.0
CANARY = tuple(2 + n * n % 6 for n in range(24))
"""Token ids of the canary prompt; any fixed ones do, and every vocabulary has these. More of them show smaller changes:
see :mod:`trinity_mq.sync.gate.canary`."""


class Trainer(Agent):
    """Steps the optimizer: in batch order under style fixed, else in the order in which batches are ready."""

    role = "trainer"
    store: CheckpointStore
    """The checkpoints; opened, and cleared of what a dead trainer left half done, once the lock is ours."""
    _attempts: StepAttempts

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str,
        learner: Learner,
        channel: Channel,
        folder: Path | None = None,
        metrics: MetricsWriter | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self.folder = folder or config.path
        self.learner = learner
        self.generation = self.step = self.progress = 0
        self.finished = False
        blobs = open_store(config.broker, topology.run)
        self._in_batch_order = config.synchronizer.sync_style == "fixed"
        self.source = StreamSource(
            bus,
            topology,
            agent_id,
            blobs,
            in_batch_order=self._in_batch_order,
            batches_per_step=config.trainer.batches_per_step,
        )
        self._blobs = ChunkBlobs(blobs, config.trainer.max_checkpoints_to_keep)
        self._lock: Lock | None = None
        self._history: History | None = None
        self._saved_progress = self._first_step = 0
        self._answered = 0
        """The last batch for which the explorer asked for our newest weights and for which they were committed."""
        self._in_hand: list[str] = []
        self.gate = CoordinatorDriver(
            name=agent_id,
            config=config.synchronizer,
            dtype=config.model.dtype,
            weights=learner,
            channel=channel,
            canary=CANARY[: config.model.max_model_len],
            publish=self._publish_sync,
            may_begin=self.evaluation_ended,
            fingerprint=fingerprint,
        )

    @property
    def version(self) -> tuple[int, int]:
        """The version of the weights the learner holds."""
        return (self.generation, self.step)

    def detail(self) -> TrainerStatus:
        """Return the counters that pace the others."""
        machine = self.gate.machine
        if not self.generation:
            # while we wait: whoever asks for the trainer's level must not find an empty one in our beat
            others = self.peers.statuses("trainer", TrainerStatus, without=self.id)
            if others:
                return others[0]
        return TrainerStatus(
            generation=self.generation,
            step=self.step,
            progress=self.progress,
            committed=machine.committed,
            committed_progress=machine.committed_progress,
            answered=self._answered,
            epoch=machine.epoch,
            phase=self.gate.phase,
            members=sorted(machine.members),
            in_hand=[*self.source.waiting, *self._in_hand],
            sync=self.gate.report(),
            finished=self.finished,
        )

    async def serve(self) -> None:
        """Train until the run is over or drained."""
        lock = self._lock = await self._take_lock()
        if lock is None:
            return
        verbs = ("join", "leave", "ready", "applied", "failed")
        queue = self.topology.listener(self.id, self.incarnation, "sync", *(f"weights.{verb}" for verb in verbs))
        await self.bus.declare(queue)
        try:
            await self._restore()
            async with await self.bus.consume(queue) as feed:
                await self.with_background(
                    self._train(),
                    self.source.run(),
                    self.gate.run(feed, self.each),
                    self._forward_wakes(),
                    self._stop_without_lock(lock),
                )
        finally:
            await self.learner.close()
            if self._history is not None:
                self._history.close()

    # -- start

    async def _take_lock(self) -> Lock | None:
        """Return the run's lock; None when asked to drain or when the run has ended without us."""
        while not (self.draining.is_set() or self._is_run_over):
            try:
                return await self.bus.lock(self.topology.lock("trainer"))
            except LockHeld:
                self.set_state("idle", "the other trainer of this run to end")
                await self.woken.wait(LOCK_RETRY)
        return None

    async def _stop_without_lock(self, lock: Lock) -> None:
        await lock.wait_lost()
        raise RestartMe("another trainer of this run has taken over while we were disconnected")

    async def _restore(self) -> None:
        self.set_state("starting", "the model")
        folder = self.folder / "checkpoints"
        self.store = CheckpointStore(folder, self.config.trainer.max_checkpoints_to_keep)
        self._attempts = StepAttempts(folder)
        checkpoint = self.store.latest()
        self.generation = self.store.next_generation()
        await self.learner.open(checkpoint.path if checkpoint else None)
        resumed: tuple[int, int] | None = None
        if checkpoint:
            state = checkpoint.state
            self.step, self.progress = state.step, state.progress
            self.source.restore(state.source)
            resumed = (state.generation, state.progress)
            found = {"generation": self.generation, "step": self.step, "progress": self.progress}
            log.info("resumed", checkpoint=checkpoint.path.name, **found)
        self._saved_progress, self._first_step = self.progress, self.step
        self._history = History(self.folder / "history", self.generation, resumed)

    async def _forward_wakes(self) -> None:
        """Let whatever changes in source or gate wake the main loop and show in a beat."""

        async def forward(changed: Any, beat: bool) -> None:
            while True:
                await changed.wait()
                self.woken.notify()
                if beat:
                    self.heartbeat_soon()

        async with asyncio.TaskGroup() as group:
            group.create_task(forward(self.source.changed, False))
            group.create_task(forward(self.gate.changed, True))

    # -- the loop

    async def _train(self) -> None:
        while not (self.draining.is_set() or self._is_run_over):
            if self.gate.someone_is_behind or self._sync_is_due():
                await self._sync()
            elif self._is_at_end:
                if not self.finished:
                    await self._finish()
                else:
                    self.set_state("idle", "the explorer to end the run")
                    await self.woken.wait()
            elif self.source.available():
                await self._consume()
            else:
                self.set_state("idle", f"batch {self.progress + 1}" if self._in_batch_order else "the next batch")
                await self.woken.wait()
        if self._is_run_over and (unused := self.source.unused):
            log.warning("repaired_batches_unused", batches=unused, reason="no batch came after them")
            self.report(self.progress, {"sample/unused_repaired_batches": float(len(unused))})
        await self._save()

    @property
    def _is_run_over(self) -> bool:
        """The explorer has done the last evaluation."""
        return any(explorer.finished for explorer in self.peers.statuses("explorer", ExplorerStatus))

    @property
    def _is_at_end(self) -> bool:
        return self.source.ended is not None and self.progress >= self.source.ended

    @property
    def _wanted(self) -> int:
        """The last batch for which the explorer asks for our newest weights."""
        return self.peers.explorer.wants

    def _sync_is_due(self) -> bool:
        machine = self.gate.machine
        boundary = Boundary(
            progress=self.progress,
            version=self.version,
            committed=machine.committed,
            committed_progress=machine.committed_progress,
            wanted=self._wanted,
            answered=self._answered,
            first_step=self._first_step,
            at_end=self._is_at_end,
        )
        return sync_due(boundary, self.config.synchronizer)

    async def _sync(self) -> None:
        machine, wanted = self.gate.machine, self._wanted
        if machine.committed == self.version and not self.gate.someone_is_behind:
            await self.gate.confirm_unchanged(self.progress)
            self._answered = max(self._answered, wanted)
            self.heartbeat_soon()
            return
        self.set_state("working" if self.gate.has_members else "holding", "engines to take the weights")
        started = asyncio.get_running_loop().time()
        syncing = self.gate.sync(self.version, self.progress)
        if await self.woken.unless(lambda: self.draining.is_set() or self._is_run_over, syncing):
            spent = asyncio.get_running_loop().time() - started
            self._answered = max(self._answered, wanted)
            self.report(self.progress, {"time/sync_weight": spent, **self.gate.metrics()})
        await self.gate.settled()
        self.heartbeat_soon()

    @property
    def _evaluation_is_pinned(self) -> bool:
        """The explorer evaluates a version that an engine still serves."""
        evaluating = self.peers.explorer.evaluating is not None
        serving = any(member.version is not None for member in self.gate.machine.members.values())
        return self._in_batch_order and evaluating and serving

    async def evaluation_ended(self) -> None:
        """Return once no evaluation is pinned to the present version, at the latest after ``explorer.eval_timeout``."""
        loop = asyncio.get_running_loop()
        state, waits_for, deadline = self.state, self.waits_for, loop.time() + self.config.explorer.eval_timeout
        while self._evaluation_is_pinned and (left := deadline - loop.time()) > 0:
            self.set_state("holding", "the evaluation of the present version")
            await self.woken.wait(min(left, HEARTBEAT_INTERVAL))  # the end of a dead explorer's lease wakes nobody
        self.set_state(state, waits_for)

    async def _consume(self) -> None:
        self.set_state("working", None)
        batch = await self.source.next()
        batches = [batch, *batch.co_batched]
        self._in_hand = [one.ticket for one in batches]
        loop = asyncio.get_running_loop()
        started = loop.time()
        result = await train_on(
            batch,
            self.step,
            learner=self.learner,
            attempts=self._attempts,
            max_staleness=self.config.synchronizer.effective_max_staleness,
        )
        self.step += result.stepped
        first, self.progress = self.progress + 1, self.progress + len(batches)
        ended = list(zip(itertools.count(first), batches, [result, *result.co_batched], strict=False))
        carried_over = list(zip(itertools.repeat(self.progress), batch.repaired, result.repaired, strict=False))
        for progress, one, end in (*ended, *carried_over):
            if end.kills:
                letter = skipped_batch_dead_letter(self._progress_of(progress, one, end), self.id, self.topology)
                await self.bus.publish(self.topology.exchange("dead"), "ready", letter)
        self.source.consumed()
        self._in_hand = []
        for number, (progress, one, end) in enumerate((*ended, *carried_over)):
            self._record(progress, one, end, repaired=number >= len(ended))
        for progress, one, end in ended:
            progress_event = self._progress_of(progress, one, end)
            body = envelope(progress_event, message_id=f"progress-{self.generation}-{progress}")
            await self.bus.publish(self.topology.exchange("results"), "progress", body)
        metrics = result.counts | result.metrics
        metrics["time/batch"] = loop.time() - started
        counters = {"trainer/generation": float(self.generation), "trainer/step": float(self.step)}
        # the gate's once more: how long engines took to serve again is known only now
        self.report(self.progress, counters | metrics | self.gate.metrics())
        self.heartbeat_soon()
        due = self.progress - self._saved_progress >= self.config.trainer.save_interval
        if due or self.source.bytes_since_save > self.config.broker.ready_max_bytes / 4:
            await self._save()

    def _record(self, progress: int, batch: TrainBatch, end: BatchResult, *, repaired: bool) -> None:
        assert self._history is not None
        self._history.record(
            progress=progress,
            step=self.step,
            batch=batch.batch,
            ticket=batch.ticket,
            op=batch.op,
            outcome=end.outcome,
            uids=batch.experiences.ids("uid") if end.outcome == "trained" else [],
            repaired=repaired,
        )
        if repaired:
            log.info("repaired_batch", batch=batch.batch, outcome=end.outcome, reason=end.reason)

    def _progress_of(self, progress: int, batch: TrainBatch, result: BatchResult) -> Progress:
        return Progress(
            progress=progress,
            generation=self.generation,
            step=self.step,
            batch=batch.batch,
            ticket=batch.ticket,
            outcome=result.outcome,
            dropped=result.dropped,
            stale_tasks=result.stale_tasks,
            reason=result.reason,
        )

    # -- saving and the end

    async def _save(self) -> None:
        if self.progress == self._saved_progress and self.store.latest() is not None:
            return
        state = TrainerState(
            generation=self.generation,
            step=self.step,
            progress=self.progress,
            source=self.source.state(),
        )
        started = asyncio.get_running_loop().time()
        await ensure_held(self.bus, self._lock)
        if (self.folder / "history" / f"{self.generation + 1}.jsonl").exists():
            raise RestartMe(
                "another trainer has gone on with this run and is gone again; this one starts anew from there"
            )
        await self.store.save(self.learner.save, state)
        self._saved_progress, self.source.bytes_since_save = self.progress, 0
        await self._blobs.saved(state.source["consumed"])
        self.report(self.progress, {"time/save_checkpoint": asyncio.get_running_loop().time() - started})

    async def _finish(self) -> None:
        """All batches are consumed and the engines hold the final weights: save them for good."""
        self.set_state("working", "the final model to be written")
        await self._save()
        checkpoint = self.store.latest()
        if checkpoint is None:
            raise FatalError("the final checkpoint cannot be found again")
        model = checkpoint.path / MODEL_FOLDER
        if model.exists():
            await asyncio.to_thread(publish_final, model, self.folder / "final")
        await self._blobs.saved(checkpoint.state.source["consumed"], last=True)
        self.finished = True
        self.heartbeat_soon()

    async def _publish_sync(self, event: SyncEvent) -> None:
        await self.publish("sync", f"weights.{event.verb}", event)


def main(config: Config, agent_id: str = "trainer-0") -> int:
    """Run the trainer until the run is over; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Trainer:
        model = ensure_model_folder(config.model, config.path / "model", config.seed)
        return Trainer(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            learner=TorchLearner(config, model, config.train_steps),
            channel=open_channel(config),
            metrics=MetricsWriter(config.path, "trainer", agent_id, config.monitor.tensorboard),
            fingerprint=fingerprint(model),
        )

    return run_daemon(config, agent_id, "trainer", build)
