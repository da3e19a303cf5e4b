"""The trainer: processed batches in, train steps, checkpoints out; leads the weight sync.

Waits for: the next batch on ``ready``, a member to give weights to, and at the end the explorer's last evaluation. One
closed batch is one unit of progress, whatever is left in it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import structlog

from trinity_mq.bus import Bus, Lock, LockHeld, Topology
from trinity_mq.config import Config
from trinity_mq.messages import Progress, SyncEvent
from trinity_mq.models import ensure_model_folder, fingerprint
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.blobs import open_store
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.locks import ensure_held
from trinity_mq.runtime.mail import envelope
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.pacing import sync_due
from trinity_mq.sync.collective import Sender
from trinity_mq.sync.gatekeeper import Channel, Gatekeeper
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.training.checkpoint import CheckpointStore, StepAttempts, TrainerState
from trinity_mq.training.chunk_blobs import ChunkBlobs
from trinity_mq.training.history import History
from trinity_mq.training.learner import MODEL_FOLDER, Learner, TorchLearner
from trinity_mq.training.material import MAX_STARTS, MAX_STARTS_REPAIRED, fresh, skipped_letter, trained_counts
from trinity_mq.training.source import StreamSource, TrainBatch

log = structlog.get_logger(__name__)

LOCK_RETRY = 2.0
CANARY = (2, 3, 4, 5, 6, 7)
"""Token ids of the canary prompt; any fixed ones do, and every vocabulary has these."""


class Trainer(Agent):
    """Steps the optimizer in batch order."""

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
        self.source = StreamSource(bus, topology, agent_id, blobs)
        self._blobs = ChunkBlobs(blobs, config.trainer.max_checkpoints_to_keep)
        self._lock: Lock | None = None
        self._history: History | None = None
        self._saved_progress = 0
        self._in_hand: str | None = None
        self.gate = Gatekeeper(
            name=agent_id,
            config=config.synchronizer,
            dtype=config.model.dtype,
            max_wait=config.explorer.eval_timeout,
            weights=learner,
            channel=channel,
            canary=CANARY,
            publish=self._publish_sync,
            fingerprint=fingerprint,
        )

    @property
    def version(self) -> tuple[int, int]:
        """The version of the weights the learner holds."""
        return (self.generation, self.step)

    def detail(self) -> dict[str, Any]:
        """Return the counters that pace the others."""
        machine = self.gate.machine
        if not self.generation:
            # while we wait: whoever asks for the trainer's level must not find an empty one in our beat
            others = [beat.detail for beat in self.peers.alive("trainer") if beat.id != self.id]
            if others:
                return others[0]
        return {
            "generation": self.generation,
            "step": self.step,
            "progress": self.progress,
            "committed": machine.committed,
            "committed_progress": machine.committed_progress,
            "epoch": machine.epoch,
            "phase": self.gate.phase,
            "members": sorted(machine.members),
            "in_hand": [*self.source.waiting, *([self._in_hand] if self._in_hand else [])],
            "finished": self.finished,
        }

    async def serve(self) -> None:
        """Train until the run is over or drained."""
        lock = self._lock = await self._take_lock()
        if lock is None:
            return
        verbs = ("join", "leave", "ready", "wait", "applied", "failed")
        ears = self.topology.listener(self.id, self.incarnation, "sync", *(f"weights.{verb}" for verb in verbs))
        await self.bus.declare(ears)
        try:
            await self._restore()
            async with await self.bus.consume(ears) as feed:
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
        self._saved_progress = self.progress
        self._history = History(self.folder / "history", self.generation, resumed)

    async def _forward_wakes(self) -> None:
        """Let whatever changes in source or gate wake the main loop and show in a beat."""

        async def forward(changed: Any, beat: bool) -> None:
            while True:
                await changed.wait()
                self.woken.notify()
                if beat:
                    self.beat_soon()

        async with asyncio.TaskGroup() as group:
            group.create_task(forward(self.source.changed, False))
            group.create_task(forward(self.gate.changed, True))

    # -- the loop

    async def _train(self) -> None:
        while not (self.draining.is_set() or self._is_run_over):
            if self.gate.someone_is_behind or self._sync_is_due():
                await self._sync()
            elif self.source.ended is not None and self.progress >= self.source.ended:
                if not self.finished:
                    await self._finish()
                else:
                    self.set_state("idle", "the explorer to end the run")
                    await self.woken.wait()
            elif self.source.available():
                await self._consume()
            else:
                self.set_state("idle", f"batch {self.progress + 1}")
                await self.woken.wait()
        if self._is_run_over and (unused := self.source.unused):
            log.warning("repaired_batches_unused", batches=unused, reason="no batch came after them")
            self.report(self.progress, {"sample/unused_repaired_batches": float(len(unused))})
        await self._save()

    @property
    def _is_run_over(self) -> bool:
        """The explorer has done the last evaluation."""
        return any(beat.detail.get("finished", False) for beat in self.peers.alive("explorer"))

    def _sync_is_due(self) -> bool:
        """A multiple of the interval was reached, or the end, and the engines do not know it yet."""
        machine = self.gate.machine
        at_end = self.source.ended is not None and self.progress >= self.source.ended
        due = sync_due(self.progress, self.config.synchronizer) or at_end
        return due and (machine.committed != self.version or machine.committed_progress < self.progress)

    async def _sync(self) -> None:
        machine = self.gate.machine
        if machine.committed == self.version and not self.gate.someone_is_behind:
            await self.gate.confirm_unchanged(self.progress)
            return
        self.set_state("working" if self.gate.has_members else "holding", "engines to take the weights")
        started = asyncio.get_running_loop().time()
        if await self._unless_over(self.gate.sync(self.version, self.progress)):
            spent = asyncio.get_running_loop().time() - started
            self.report(self.progress, {"time/sync_weight": spent, "sync/aborts": float(self.gate.aborts)})
        await self.gate.settled()
        self.beat_soon()

    async def _unless_over(self, work: Awaitable[None]) -> bool:
        """Await ``work``, but give it up when asked to drain or when the run is over; True when it was done."""
        over = self.woken.until(lambda: self.draining.is_set() or self._is_run_over)
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(over)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
                return True
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _consume(self) -> None:
        self.set_state("working", None)
        batch = await self.source.next()
        self._in_hand = batch.ticket
        loop = asyncio.get_running_loop()
        started = loop.time()
        metrics = await self._decide(batch)
        self.progress += 1
        self.source.consumed()
        self._in_hand = None
        self._record(batch)
        for one in batch.repaired:
            self._record(one, repaired=True)
            log.info("repaired_batch", batch=one.batch, along_with=batch.batch, outcome=one.outcome, reason=one.reason)
        told = self._told(batch, dropped=int(metrics.get("sample/dropped_stale_experiences", 0)))
        mail = envelope(told, message_id=f"progress-{self.generation}-{self.progress}")
        await self.bus.publish(self.topology.exchange("results"), "progress", mail)
        metrics["time/batch"] = loop.time() - started
        counters = {"trainer/generation": float(self.generation), "trainer/step": float(self.step)}
        self.report(self.progress, counters | trained_counts(batch) | metrics)
        self.beat_soon()
        due = self.progress - self._saved_progress >= self.config.trainer.save_interval
        if due or self.source.bytes_since_save > self.config.broker.ready_max_bytes / 4:
            await self._save()

    def _record(self, batch: TrainBatch, *, repaired: bool = False) -> None:
        assert self._history is not None
        self._history.record(
            progress=self.progress,
            step=self.step,
            batch=batch.batch,
            ticket=batch.ticket,
            op=batch.op,
            outcome=batch.outcome,
            uids=batch.experiences.ids("uid") if batch.state == "trained" else [],
            repaired=repaired,
        )

    def _told(self, batch: TrainBatch, **more: int) -> Progress:
        found: dict[str, Any] = {name: getattr(batch, name) for name in ("batch", "ticket", "outcome", "reason")}
        found |= {name: getattr(self, name) for name in ("progress", "generation", "step")}
        return Progress(**{**found, **more})

    async def _decide(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the batch, and repaired ones along with it, if there is something to train on; each gets its outcome
        as its state.
        """
        usable = [batch] if await self._is_usable(batch, MAX_STARTS) else []
        usable += [one for one in batch.repaired if await self._is_usable(one, MAX_STARTS_REPAIRED)]
        if not usable:
            return {}
        kept, metrics = fresh(usable, self.step, self.config.synchronizer.effective_max_staleness)
        tickets = [one.ticket for one in usable if one.experiences]
        if not tickets:
            return metrics
        self._attempts.begin(tickets)
        metrics |= await self.learner.step(kept, self.step + 1)
        self._attempts.finish(tickets)
        stepped = metrics.get("actor/optimizer_steps", 1.0) > 0
        self.step += int(stepped)
        for one in usable:
            if one.experiences:
                one.state, one.reason = ("trained", None) if stepped else ("skipped", "no optimizer step was possible")
        return metrics

    async def _is_usable(self, batch: TrainBatch, max_starts: int) -> bool:
        """Whether it was processed, and has not ended the trainer too often."""
        if batch.state != "ready":
            log.warning("batch_skipped", batch=batch.batch, state=batch.state, reason=batch.reason)
            return False
        if self._attempts.starts(batch.ticket) < max_starts:
            return True
        starts = "1 start" if max_starts == 1 else f"{max_starts} starts"
        batch.state, batch.reason = "skipped", f"the trainer did not survive {starts} on this batch"
        letter = skipped_letter(self._told(batch, progress=self.progress + 1), self.id, self.topology)
        await self.bus.publish(self.topology.exchange("dead"), "ready", letter)
        # its starts stay on record: a restart from an older checkpoint meets it again, and must skip it again
        return False

    # -- saving and the end

    async def _save(self) -> None:
        if self.progress == self._saved_progress and self.store.latest() is not None:
            return
        state = TrainerState(
            generation=self.generation,
            step=self.step,
            progress=self.progress,
            source=self.source.state(),
            fingerprint=self.config.name,
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
        self.beat_soon()

    async def _publish_sync(self, event: SyncEvent) -> None:
        await self.publish("sync", f"weights.{event.verb}", event)


def publish_final(model: Path, final: Path) -> None:
    """Put a copy of the Hugging Face folder ``model`` at ``final``, whole or not at all."""
    fresh = final.with_name(f".{final.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(model, fresh)
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)


def main(config: Config, agent_id: str = "trainer-0") -> int:
    """Run the trainer until the run is over; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Trainer:
        model = ensure_model_folder(config.model, config.path / "model", config.seed)
        sync = config.synchronizer
        return Trainer(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            learner=TorchLearner(config, model, config.buffer.total_steps),
            channel=Sender(sync.host, sync.bucket_bytes, sync.sync_timeout, sync.backend),
            metrics=MetricsWriter(config.path, "trainer", agent_id, config.monitor.tensorboard),
            fingerprint=fingerprint(model),
        )

    return run_daemon(config, agent_id, "trainer", build)
