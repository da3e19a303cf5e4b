"""The train loop: trains on processed batches, syncs the weights where due, and saves checkpoints.

:class:`CheckpointSaver` saves checkpoints, one at a time, and in the background if the configuration allows it.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from trinity_agents.trainer.batch_result import TrainSamples, dump_batch, skipped_batch_dead_letter, train_on
from trinity_agents.trainer.card import ColocatedLearner
from trinity_agents.trainer.history import History, StreamPosition, last_generation, last_progress, last_saved
from trinity_agents.trainer.pinning import wait_for_evaluation
from trinity_agents.trainer.sources.base import Source, TrainBatch
from trinity_agents.trainer.sources.mix import MixSource
from trinity_agents.trainer.sources.records import RecordSource
from trinity_agents.trainer.sources.replay import ReplaySource
from trinity_agents.trainer.sources.stream import REMEMBERED, StreamSource
from trinity_mq.dispatch.pacing import Boundary, sync_due
from trinity_mq.messages import Progress, SyncEvent, TrainerStatus
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.processes.chaos_points import pass_point
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.gate.canary import FIRST_IDS
from trinity_mq.sync.gate.coordinator_driver import CoordinatorDriver
from trinity_mq.telemetry import work_for
from trinity_mq.telemetry.durations import WorkUnderWay
from trinity_mq.telemetry.trace import record, span, works_on
from trinity_mq.telemetry.trace_ids import VERSION
from trinity_mq.training.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    DamagedCheckpoint,
    DamagedCheckpointError,
    StepAttempts,
    TrainerProgress,
    Writer,
    publish_final,
    verify,
)
from trinity_mq.training.guard import TrainingStopped
from trinity_mq.training.learner import Learner
from trinity_mq.transport.batch_blobs import ChunkBlobs
from trinity_mq.transport.blobs import open_store

log = structlog.get_logger(__name__)

QUIET_SECONDS = 10.0
"""Seconds for which a restarted trainer waits for the next batch on which an earlier generation trained, before it
syncs weights. The stream still holds these batches, so they arrive soon."""

Committed = Callable[[TrainerProgress, float], Awaitable[None]]
"""Called with the state of a committed checkpoint, and the seconds since the write began."""


class TrainLoop:
    """Trains on batches: in batch order with sync style ``fixed``, otherwise in order of arrival.

    Args:
        agent: The trainer, whose lock, bus, heartbeats and peers are used.
        learner: Holds the weights and makes the optimizer steps.
        channel: Carries weights to the engines.
        folder: The run's folder.
        fingerprint: Fingerprint of the tokenizer and the chat template, which must be the same in all engines.
        canary: Token ids of the canary prompt; a longer prompt detects smaller weight changes.
        source: Source of train batches; None: the stream of rollouts.
        experts: Expert answers that are trained on together with the rollouts.
    """

    store: CheckpointStore
    """The checkpoints; opened once this trainer has the lock. Opening them removes the unfinished files of a dead
    trainer."""
    saver: CheckpointSaver
    _attempts: StepAttempts
    _history: History | None = None

    def __init__(
        self,
        agent: Agent,
        learner: Learner,
        channel: Channel,
        *,
        folder: Path,
        fingerprint: str | None = None,
        canary: Sequence[int] = FIRST_IDS,
        source: Source | None = None,
        experts: RecordSource | None = None,
    ) -> None:
        self.agent, self.config, self.folder, self.learner = agent, agent.config, folder, learner
        self.generation = self.step = self.progress = 0
        self.finished = False
        config = agent.config
        blobs = open_store(config.broker, agent.topology.run)
        self._is_alone = config.mode == "train"
        """True in mode ``train``, which has neither explorer nor engines."""
        self._max_staleness = sys.maxsize if config.accepts_any_age else config.synchronizer.effective_max_staleness
        self._in_batch_order = config.synchronizer.sync_style == "fixed"
        stream = StreamSource(
            agent.bus,
            agent.topology,
            agent.id,
            blobs,
            in_batch_order=self._in_batch_order,
            batches_per_step=config.trainer.batches_per_step,
            starts=self._starts,
            # The blobs of a ticket are deleted only after max_checkpoints_to_keep checkpoints have consumed the ticket.
            remembered=max(REMEMBERED, (config.trainer.max_checkpoints_to_keep + 2) * config.trainer.save_interval),
        )
        replays = config.buffer.trainer_input.replay.share > 0
        self.source: Source = source or (ReplaySource(stream, config) if replays else stream)
        if experts is not None:
            self.source = MixSource(self.source, experts)
        self.source.changed = agent.woken
        self._blobs = ChunkBlobs(blobs, config.trainer.max_checkpoints_to_keep)
        monitor = config.monitor
        self._samples = TrainSamples(folder, monitor.samples_per_step, monitor.samples_max_bytes)
        self._saved_progress = self._first_step = 0
        self._last_save = 0
        """Progress at the start of the last save."""
        self._bytes_saved = 0
        """Bytes read from the stream between the last committed checkpoint and the start of the checkpoint that is
        being written.
        """
        self._earlier_progress = 0
        """Highest progress of the earlier generations."""
        self._replay_ends = self._quiet_ends = 0.0
        self._saved_run: str | None = None
        """Id of the run to which the checkpoints belong."""
        self._answered = 0
        """The last batch whose request for the newest weights was answered: the weights are committed."""
        self._in_hand: list[str] = []
        self._waited = self._counts_since = 0.0
        self._work = WorkUnderWay()
        self._card = learner if isinstance(learner, ColocatedLearner) else None
        """The learner, if it shares its card with engines."""
        self.gate = CoordinatorDriver(
            name=agent.id,
            config=config.synchronizer,
            dtype=config.model.dtype,
            weights=learner,
            channel=channel,
            canary=canary[: config.model.max_model_len],
            publish=self._publish_sync,
            may_begin=self.evaluation_ended,
            fingerprint=fingerprint,
        )

    def _starts(self, key: str) -> int:
        """Return the number of crashed train steps on a batch or group, by its key."""
        return self._attempts.starts(key)

    @property
    def version(self) -> tuple[int, int]:
        """The (generation, step) of the weights that the learner holds."""
        return (self.generation, self.step)

    def detail(self) -> TrainerStatus:
        """Return the counters that pace the other agents."""
        machine = self.gate.machine
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
            doing=self._work.what,
            doing_seconds=self._work.seconds,
            usual_seconds=self._work.usual_seconds,
        )

    async def restore(self) -> None:
        """Load the latest or the chosen checkpoint, or else the initial model, and begin a new generation."""
        self.agent.set_state("starting", "the model")
        folder, histories = self.folder / "checkpoints", self.folder / "history"
        settings = self.config.trainer
        self.store = CheckpointStore(folder, settings.max_checkpoints_to_keep, settings.keep_every)
        # with LoRA or an export, the writer of a checkpoint also reads the live model, which must then stay on the card
        reads_model = self.config.model.lora is not None or settings.export == "every"
        in_background = settings.async_save and not (self._card and reads_model)
        self.saver = CheckpointSaver(self.store, self.learner, in_background=in_background)
        self._attempts = StepAttempts(folder)
        # The generation is claimed first, so that a checkpoint that an earlier generation saves after this is neither
        # loaded nor reported as lost.
        self.generation = self.store.next_generation(after=last_generation(histories))
        checkpoint = await self._load()
        if checkpoint and checkpoint.state.run_id:
            self._saved_run = checkpoint.state.run_id
            if self.agent.bus.run_id:
                self.check_run(self.agent.bus.run_id)
            self.agent.bus.run_id = self._saved_run
        if self._is_alone and self.agent.bus.run_id is None:
            self.agent.bus.run_id = uuid.uuid4().hex
        resumed: tuple[int, int] | None = None
        if checkpoint:
            state = checkpoint.state
            self.step, self.progress = state.step, state.progress
            self.source.restore(state.source)
            resumed = (state.generation, state.progress)
            position = {"generation": self.generation, "step": self.step, "progress": self.progress}
            log.info("resumed", checkpoint=checkpoint.path.name, **position)
        self._saved_progress, self._first_step = self.progress, self.step
        self._last_save = self.progress
        self._earlier_progress = last_progress(histories)
        self._history = History(histories, self.generation, resumed)

    async def _load(self) -> Checkpoint | None:
        """Load the newest usable checkpoint, or the chosen checkpoint. If no checkpoint was ever saved, load the
        initial model and return None.

        Raises:
            CheckpointError: No saved checkpoint is usable, or the chosen checkpoint is not usable. Only the user
                decides to resume from another step.
        """
        whole, damaged = self.store.usable()
        only = self.store.only(whole)
        for checkpoint in [candidate for candidate in whole if only in {None, candidate.path.name}]:
            try:
                await asyncio.to_thread(verify, checkpoint)
                await self.learner.open(checkpoint.path)
            except DamagedCheckpointError as error:
                log.warning("damaged_checkpoint_skipped", path=str(checkpoint.path), reason=str(error))
                damaged.append(DamagedCheckpoint(checkpoint.path, str(error)))
            else:
                if damaged:
                    self.agent.report(checkpoint.state.progress, {"trainer/damaged_checkpoints": float(len(damaged))})
                return checkpoint
        folder = self.folder / "checkpoints"
        saved = last_saved(self.folder / "history")
        if damaged or saved is not None:
            reasons = "; ".join(f"{candidate.path.name}: {candidate.reason}" for candidate in damaged)
            lost = f"damaged: {reasons}" if reasons else f"there is none, although progress {saved} was saved"
            others = f"choose another checkpoint than {only} with `trinity-mq run --from`, " if only else ""
            raise CheckpointError(
                f"no usable checkpoint in {folder}: {lost}. Put an undamaged copy back and run the same command "
                f"again, {others}or train from the first step again with `trinity-mq run --fresh`"
            )
        await self.learner.open(None)
        return None

    def check_run(self, run_id: str) -> None:
        """Check that the explorer's run is the run that this trainer trains; an unknown run passes.

        Raises:
            FatalError: The checkpoints belong to another run.
            RestartRequested: The explorer has started another run since this process started.
        """
        if self._saved_run and self._saved_run != run_id:
            raise FatalError(
                f"the checkpoints in {self.folder / 'checkpoints'} are of run {self._saved_run}, but the explorer's "
                f"state is of run {run_id}: one of the two was removed, or comes from elsewhere. To resume the old "
                "run, restore its folder state/; to start over, use `trinity-mq run CONFIG --fresh`, or move "
                "checkpoints/ and history/ out of the run folder"
            )
        own_run = self.agent.bus.run_id
        if self.generation and own_run and own_run != run_id:
            raise RestartRequested(f"the explorer has started another run: {run_id} instead of {own_run}")

    async def close(self) -> None:
        """Close the learner, the history and the sample log."""
        await self.learner.close()
        if self._history is not None:
            self._history.close()
        self._samples.close()

    async def watch_gate(self) -> None:
        """Wake this loop and send a heartbeat after each change of the gate, until cancelled."""
        while True:
            await self.gate.changed.wait()
            self.agent.woken.notify()
            self.agent.heartbeat_soon()

    async def withdraw_attempt(self) -> None:
        """Withdraw the recorded attempt once this process is asked to end or is cancelled.

        A step that is interrupted after this point does not count as a crash of its batch.
        """
        try:
            await self.agent.draining.wait()
        finally:
            self._attempts.withdraw()

    async def run(self) -> None:
        """Train and sync weights until the run is over or the agent is asked to drain, then save a checkpoint."""
        agent = self.agent
        self._replay_ends = asyncio.get_running_loop().time() + self.config.explorer.max_timeout
        self._quiet_ends = asyncio.get_running_loop().time() + QUIET_SECONDS
        self._counts_since = asyncio.get_running_loop().time()
        while not (agent.draining.is_set() or self.is_run_over):
            replay_left = self._replay_left
            if not replay_left and (self.gate.needs_full_sync or self._sync_is_due()):
                await self._sync()
            elif self._is_at_end:
                if not self.finished:
                    await self._finish()
                else:
                    agent.set_state("idle", "the explorer to end the run")
                    if self._card is not None:
                        await self._card.rest()
                    await agent.woken.wait()
            elif self.source.available():
                await self._consume()
                self._quiet_ends = asyncio.get_running_loop().time() + QUIET_SECONDS
            else:
                agent.set_state("idle", f"batch {self.progress + 1}" if self._in_batch_order else "the next batch")
                with self._waiting_for_data():
                    if self._card is not None:
                        await self._card.rest()
                    await agent.woken.wait(replay_left or None)
        if self.is_run_over and (unused := self.source.unused):
            log.warning("repaired_batches_unused", batches=unused, reason="no batch came after them")
            agent.report(self.progress, {"sample/unused_repaired_batches": float(len(unused))})
        await self._save()
        await self.saver.idle()

    @property
    def _replay_left(self) -> float:
        """Remaining seconds of the phase that trains on an earlier generation's batches before any weight sync.

        The value is 0 after this phase. Without it, running rollouts would end with weights as old as the checkpoint,
        and their groups would be dropped as stale. Engines without weights wait during this phase, for at most the
        time limit of one rollout attempt (``explorer.max_timeout``), or for :data:`QUIET_SECONDS` without a batch.
        """
        now = asyncio.get_running_loop().time()
        if self._is_alone or self.progress >= self._earlier_progress:
            return 0.0
        ends = self._replay_ends if self.source.available() else min(self._replay_ends, self._quiet_ends)
        return max(0.0, ends - now)

    @property
    def is_run_over(self) -> bool:
        """Whether the explorer has finished the last evaluation; in mode ``train`` whether the final save is done."""
        return (self._is_alone and self.finished) or self.agent.peers.explorer.finished

    @property
    def _is_at_end(self) -> bool:
        ended, total = self.source.ended, self.agent.peers.explorer.total_batches
        is_extended = ended is not None and total is not None and total > ended
        return ended is not None and self.progress >= ended and not is_extended

    @property
    def _requested_batch(self) -> int:
        """The last batch for which the explorer requests the newest weights."""
        return self.agent.peers.explorer.wants

    def _sync_is_due(self, more: int = 0) -> bool:
        """Return whether a sync is due now, or after ``more`` further batches and steps."""
        if self._is_alone:
            return False
        machine = self.gate.machine
        boundary = Boundary(
            progress=self.progress + more,
            version=(self.generation, self.step + more),
            committed=machine.committed,
            committed_progress=machine.committed_progress,
            wanted=self._requested_batch,
            answered=self._answered,
            first_step=self._first_step,
            at_end=self._is_at_end,
        )
        return sync_due(boundary, self.config.synchronizer)

    async def _sync(self) -> None:
        machine, requested = self.gate.machine, self._requested_batch
        if machine.committed == self.version and not self.gate.needs_full_sync:
            if self._card is not None:
                await self._card.rest()
            await self.gate.confirm_unchanged(self.progress)
            self._answered = max(self._answered, requested)
            self.agent.heartbeat_now()
            return
        if self._card is not None:
            await self._card.hand_over()
        self.agent.set_state("working" if self.gate.has_members else "holding", "engines to take the weights")
        started = asyncio.get_running_loop().time()
        syncing = self.gate.sync(self.version, self.progress)
        with self._work.doing("sync", f"the weight sync of version {self.version[0]}.{self.version[1]}"):
            done = await self.agent.woken.unless(lambda: self.agent.draining.is_set() or self.is_run_over, syncing)
        if done:
            spent = asyncio.get_running_loop().time() - started
            self._answered = max(self._answered, requested)
            self.agent.report(self.progress, {"time/sync": spent, **self.gate.metrics()})
        await self.gate.settled()
        self.agent.heartbeat_now()

    async def evaluation_ended(self) -> None:
        """Wait until no evaluation is pinned to the present version (style ``fixed`` only).

        The wait lasts at most ``explorer.eval_timeout`` seconds.
        """
        if self._in_batch_order:
            await wait_for_evaluation(self.agent, self.gate.machine)

    async def _consume(self) -> None:
        self.agent.set_state("working", None)
        self.finished = False  # a finished run may be extended
        with self._waiting_for_data():
            batch = await self.source.next()
        works_on(batch.batch)
        with work_for(batch.batch, batch.ticket):
            await self._train(batch)

    async def _train(self, batch: TrainBatch) -> None:
        """Make the train step of a batch with its other batches, record and publish their outcomes, and save a
        checkpoint if due.
        """
        agent, loop = self.agent, asyncio.get_running_loop()
        self._in_hand = [part.ticket for part in batch.parts if not part.is_repaired]
        started = loop.time()
        if self._card is not None:
            await self._take_card(self._card)
        try:
            with self._work.doing("step", f"the train step on batch {batch.batch}"):
                result = await train_on(
                    batch,
                    self.step,
                    learner=self.learner,
                    attempts=self._attempts,
                    max_staleness=self._max_staleness,
                )
        except TrainingStopped as error:
            tokenizer = self.folder / "model" if self.config.model.tiny else Path(str(self.config.model.model_path))
            dump_message = await asyncio.to_thread(dump_batch, batch, self.folder, tokenizer)
            raise TrainingStopped(f"{error}. {dump_message}") from error
        self.step += result.stepped
        ended = [(part, self._progress_of(part)) for part in batch.parts]
        for part, event in ended:
            if part.result is not None and part.result.kills:
                letter = skipped_batch_dead_letter(part, event.reason or "", agent.id, agent.topology)
                await agent.bus.publish(agent.topology.exchange("dead"), "ready", letter)
        self.source.consumed()
        self._in_hand = []
        began = time.monotonic()
        for part, event in ended:
            self._record(part, event)
            if part.is_repaired:
                log.info("repaired_batch", batch=part.batch, outcome=event.outcome, reason=event.reason)
        version = f"{self.generation}.{self.step}"
        record("write history", began, time.monotonic(), batch=batch.batch, attributes={VERSION: version})
        ended = [(part, event) for part, event in ended if not part.is_repaired]
        for _, event in [] if self._is_alone else ended:
            await agent.publish("results", "progress", event, message_id=f"progress-{self.generation}-{event.progress}")
        with span("keep samples", threads=True):
            await self._samples.keep(self.step, [part.experiences for part, _ in ended if part.trained])
        metrics = result.metrics | batch.source_metrics
        metrics["time/batch"] = loop.time() - started
        metrics |= self._wait_metrics()
        counters = {"trainer/generation": float(self.generation), "trainer/step": float(self.step)}
        # The gate's metrics are reported again, because the time until engines serve again is known only now.
        with span("write metrics"):
            agent.report(self.progress, counters | metrics | self.gate.metrics())
        agent.heartbeat_soon()
        for part, event in ended:
            log.info("batch_done", batch=part.batch, ticket=part.ticket, outcome=event.outcome, train_step=event.step)
        if self._save_is_due:
            await self._save()

    async def _take_card(self, card: ColocatedLearner) -> None:
        """Take the card for a train step. Engines discard their weights if new weights follow and no evaluation needs
        the present weights.
        """
        follows = self._sync_is_due(more=1) and self.agent.peers.explorer.evaluating is None
        self.agent.set_state("holding", "the engines to leave the card")
        await card.take(2 if follows else 1)
        self.agent.set_state("working", None)

    @property
    def _save_is_due(self) -> bool:
        settings, since = self.config.trainer, self._last_save
        if settings.keep_every is not None and self.progress // settings.keep_every > since // settings.keep_every:
            return True
        read = self.source.bytes_since_save - self._bytes_saved
        return self.progress - since >= settings.save_interval or read > self.config.broker.ready_max_bytes / 4

    @contextmanager
    def _waiting_for_data(self) -> Iterator[None]:
        """Add the duration of the ``with`` block to the time that the trainer waits for data."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            yield
        finally:
            self._waited += loop.time() - started

    def _wait_metrics(self) -> dict[str, float]:
        """Return the seconds of waiting for data since the last call, and their share of the time since then."""
        now = asyncio.get_running_loop().time()
        waited, passed = self._waited, now - self._counts_since
        self._waited, self._counts_since = 0.0, now
        return {"time/wait_data": waited} | ({"trainer/idle_frac": waited / passed} if passed else {})

    def _record(self, batch: TrainBatch, event: Progress) -> None:
        assert self._history is not None
        self._history.record(
            progress=event.progress,
            step=event.step,
            batch=batch.batch,
            ticket=batch.ticket,
            op=batch.op,
            outcome=event.outcome,
            uids=batch.experiences.ids("uid") if event.outcome == "trained" else [],
            repaired=batch.is_repaired,
            dropped=event.dropped,
            replayed=list(dict.fromkeys(batch.replayed.ids("tid"))),
            stream=None if self._is_alone else StreamPosition(batch.offset, batch.offsets, batch.announced),
        )

    def _progress_of(self, batch: TrainBatch) -> Progress:
        """Count a batch as progress, unless it was counted as failed before, and return the event with its result."""
        assert batch.result is not None
        self.progress += not batch.is_repaired
        return Progress(
            progress=self.progress,
            generation=self.generation,
            step=self.step,
            batch=batch.batch,
            ticket=batch.ticket,
            outcome=batch.result.outcome,
            dropped=batch.result.dropped,
            stale_tasks=batch.result.stale_tasks,
            reason=batch.result.reason,
            filtered_groups=batch.filtered_groups,
        )

    # -- saving checkpoints, and the end of the run

    async def _save(self) -> None:
        """Start to save the present state after the previous checkpoint is written, unless the state is already saved.
        If checkpoints are not written in the background, the checkpoint is committed on return.
        """
        await self.saver.idle()
        if self.progress == self._saved_progress and self.store.latest() is not None:
            return
        state = TrainerProgress(
            generation=self.generation,
            step=self.step,
            progress=self.progress,
            source=self.source.state(),
            run_id=self.agent.bus.run_id,
        )
        started = asyncio.get_running_loop().time()
        await self.agent.ensure_lock()
        assert self._history is not None
        await asyncio.to_thread(self._history.sync)
        self._last_save, self._bytes_saved = self.progress, self.source.bytes_since_save
        with span("save checkpoint", threads=True), self._work.doing("save", f"checkpoint {self.progress}"):
            await self.saver.save(state, self._saved)
        self.agent.report(self.progress, {"time/save": asyncio.get_running_loop().time() - started})

    async def _saved(self, state: TrainerProgress, seconds: float) -> None:
        """Record a committed checkpoint, and let the blobs of its consumed tickets be deleted; the write took
        ``seconds``.
        """
        assert self._history is not None
        self._history.saved(state.progress)
        self._saved_progress, self._saved_run = state.progress, state.run_id
        self.source.bytes_since_save -= self._bytes_saved
        self._bytes_saved = 0
        await self._blobs.saved(_consumed_tickets(state.source))
        self.agent.report(state.progress, {"time/write_checkpoint": seconds})

    async def _finish(self) -> None:
        """Save the last checkpoint and write the final model, after all batches are consumed. No model is written in
        mode ``explore`` or if no train step changed the weights.
        """
        self.agent.set_state("working", "the final model to be written")
        with self._work.doing("final", "the final model"):
            await self._save()
            await self.saver.idle()
        checkpoint = self.store.latest()
        if checkpoint is None:
            raise FatalError("the final checkpoint cannot be found again")
        if self.config.mode == "explore":
            log.info("model_unchanged", reason="mode explore trains nothing")
        elif self.step == 0:
            log.warning("final_model_not_written", reason="no train step changed the weights")
        else:
            await publish_final(self.learner.export, self.folder / "final")
        await self._blobs.saved(_consumed_tickets(checkpoint.state.source), last=True)
        self.finished = True
        self.agent.heartbeat_now()

    async def _publish_sync(self, event: SyncEvent) -> None:
        await self.agent.publish("sync", f"weights.{event.verb}", event)


def _consumed_tickets(source: Mapping[str, Any]) -> set[str]:
    """Return the tickets in a source's state whose chunks are never read again."""
    return set(source.get("consumed", ())) - set(source.get("replay", {}).get("offsets", ()))


class CheckpointSaver:
    """Saves checkpoints, one at a time. In the background, it copies the learner's state and writes the copy while
    training continues.

    Args:
        store: Store of the checkpoints.
        learner: Learner whose state is saved.
        in_background: True: :meth:`run` writes the checkpoint. False: :meth:`save` returns once it is committed.
    """

    def __init__(self, store: CheckpointStore, learner: Learner, *, in_background: bool) -> None:
        self._store, self._learner, self._in_background = store, learner, in_background
        self._staged: tuple[Writer, TrainerProgress, Committed] | None = None
        """The staged checkpoint that :meth:`run` writes, None without a staged checkpoint."""
        self._changed = Notifier()

    async def save(self, state: TrainerProgress, committed: Committed) -> None:
        """Start a checkpoint after the previous checkpoint is committed; the weights may change after the return.

        Args:
            state: The trainer's state, saved next to the learner's files.
            committed: Awaited after the checkpoint is committed, before the next checkpoint is started.

        Raises:
            RestartRequested: A trainer of a newer generation has taken over the run.
            CheckpointError: The checkpoint could not be written; only if not ``in_background``.
        """
        await self.idle()
        if not self._in_background:
            await self._write(self._learner.save, state, committed)
            return
        self._store.check_generation(state)
        self._staged = (await self._learner.stage(), state, committed)
        self._changed.notify()

    async def idle(self) -> None:
        """Wait until no checkpoint is being written. If a write fails, :meth:`run` raises and this never returns."""
        await self._changed.until(lambda: self._staged is None)

    async def run(self) -> None:
        """Write each staged checkpoint to disk, until cancelled.

        Raises:
            CheckpointError: A checkpoint could not be written; older checkpoints are untouched.
            RestartRequested: A trainer of a newer generation has taken over the run.
        """
        while True:
            await self._changed.until(lambda: self._staged is not None)
            assert self._staged is not None
            await self._write(*self._staged)
            self._staged = None
            self._changed.notify()

    async def _write(self, write: Writer, state: TrainerProgress, committed: Committed) -> None:
        started = asyncio.get_running_loop().time()
        await self._store.save(write, state)
        pass_point("saved checkpoint")
        await committed(state, asyncio.get_running_loop().time() - started)
