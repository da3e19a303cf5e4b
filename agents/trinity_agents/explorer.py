"""The explorer: tasks in, slices out, outcomes counted, batches closed; evaluates and hosts the engine.

Waits for: committed weights (the pacing), outcomes on ``results``, and at the end the final weights for the last
evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Delivery, LockHeld, Topology
from trinity_mq.config import Config
from trinity_mq.data import Taskset, open_taskset
from trinity_mq.messages import Beat, RunEnd, SubmissionOutcome, SyncEvent, TaskBody, TaskSubmission, Version
from trinity_mq.runtime.agent import BEAT_LEASE, Agent
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.mail import envelope, park
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.batches import Batches
from trinity_mq.scheduling.evaluations import Evaluations
from trinity_mq.scheduling.intake import Intake, TaskSupply
from trinity_mq.scheduling.scheduler import Scheduler
from trinity_mq.scheduling.state import ExplorerState, StateFile
from trinity_mq.scheduling.tickets import SubmissionRef
from trinity_mq.sync.membership import Membership
from trinity_mq.telemetry import MetricsWriter

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.models import EngineHost

log = structlog.get_logger(__name__)

LOCK_RETRY = 2.0
CLOCK_TICK = 1.0
ENGINE_LEASE = 3 * BEAT_LEASE
"""An engine is believed in for longer than its host: it outlives the host's restart."""


class Explorer(Agent):
    """The one scheduling explorer of a run."""

    role = "explorer"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology | None = None,
        agent_id: str = "explorer-0",
        engine: EngineHost | Any = None,
        folder: Path | None = None,
        taskset: TaskSupply | None = None,
        eval_sets: Mapping[str, Sequence[TaskBody]] | None = None,
        metrics: MetricsWriter | None = None,
    ) -> None:
        topology = topology or Topology(config.name)
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self.engine = engine
        self._file = StateFile((folder or config.path) / "state" / "explorer.msgpack")
        self._taskset, self._eval_sets, self._metrics = taskset, eval_sets or {}, metrics
        self.exploration: Exploration | None = None

    def detail(self) -> dict[str, Any]:
        """Return what runners, the trainer and the display need to know."""
        return self.exploration.detail() if self.exploration else {"open": [], "finished": False}

    def extra_beats(self) -> list[Beat]:
        """Return the engine's beat."""
        if self.exploration is None or not self.engine.snapshot.alive:
            return []
        snapshot, version = self.engine.snapshot, self.exploration.membership.version
        return [
            Beat(
                role="engine",
                id=snapshot.id,
                seq=self.beat_seq,
                incarnation=self.incarnation,
                lease=ENGINE_LEASE,
                state="working" if version else "holding",
                waits_for=None if version else "weights",
                detail={**snapshot.detail(), "version": version},
            )
        ]

    async def serve(self) -> None:
        """Explore until the run is over or drained."""
        lock = await self._lock()
        if lock is None:
            return
        state = self._file.load()
        state.incarnations += 1
        self.beat_seq = state.incarnations << 32  # beats of a later life always count as later
        self.exploration = Exploration(self, state, self._file, self._taskset, self._eval_sets, self._metrics)
        try:
            await self.engine.start()
            await self.with_background(
                self.explore(), self._stop_without_lock(lock), *await self.exploration.background()
            )
            await self.exploration.membership.leave()
        finally:
            # a drained or finished run needs no engine; one whose explorer failed is adopted by the next
            await (self.engine.stop() if self.draining.is_set() or state.finished else self.engine.detach())

    async def explore(self) -> str:
        """Open, follow and close batches and evaluate, period after period; returns this explorer's name at the end.

        One period under style ``fixed`` with interval n::

            explorer | step 1 | step 2 | ... | step n | eval | sync |
            trainer  | idle   | step 1 | step 2 | ...  | step n | sync |
        """
        assert self.exploration is not None
        await self.exploration.run()
        return self.id

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> None:
        """Meet rank 0 at ``master_address:master_port`` and take one broadcast of the tensors in ``state_dict_meta``.

        Args:
            master_address: Where the sender's TCPStore listens.
            master_port: Its port.
            state_dict_meta: ``(name, dtype, shape)`` in the order sent. The gate does the same with what ``prepare``
            carries.
        """
        sync = self.config.synchronizer
        spec = {
            "host": master_address,
            "port": master_port,
            "bucket_bytes": sync.bucket_bytes,
            "epoch": 0,
            "attempt": 0,
            "rank": 1,
            "world": 2,
            "seconds": sync.sync_timeout,
            "manifest": list(state_dict_meta or []),
            "canary": {},
        }
        await self.engine.pause(sync.sync_timeout)
        await self.engine.receive(spec, sync.sync_timeout + 5.0)

    async def get_weight(self, name: str) -> Tensor:
        """Return one weight as the engine holds it, on the CPU."""
        from safetensors.torch import load

        weight: Tensor = load(await self.engine.weight(name))[name]
        return weight

    async def _lock(self) -> Any:
        while not self.draining.is_set():
            try:
                return await self.bus.lock(self.topology.lock("explorer"))
            except LockHeld:
                self.set_state("idle", "the other explorer of this run to end")
                await self.woken.wait(LOCK_RETRY)
        return None

    async def _stop_without_lock(self, lock: Any) -> None:
        await lock.wait_lost()
        raise RestartMe("another explorer of this run has taken over while we were disconnected")


class Exploration:
    """The parts of one life of an explorer, wired."""

    def __init__(
        self,
        agent: Explorer,
        state: ExplorerState,
        file: StateFile,
        taskset: TaskSupply | None,
        eval_sets: Mapping[str, Sequence[TaskBody]],
        metrics: MetricsWriter | None,
    ) -> None:
        self.agent, self.state, self._file, self._metrics = agent, state, file, metrics
        config, woken = agent.config, agent.woken
        self.config = config
        self.scheduler = Scheduler(
            config,
            bus=agent.bus,
            topology=agent.topology,
            owner=agent.id,
            save=self.save,
            next_beat=lambda: agent.beat_seq + 1,
            tickets=state.tickets,
            results_offset=0 if state.results_offset is None else state.results_offset,
        )
        self.membership = Membership(
            name=agent.id,
            lease=config.synchronizer.member_lease,
            engine=agent.engine,
            publish=self._publish_sync,
            committed=self._committed,
        )
        self.membership.on_commit = self._on_commit
        self.intake = Intake(config, state, taskset)
        self.evaluations = Evaluations(
            config, state, self.scheduler, self.membership, eval_sets, save=self.save, report=self._report, woken=woken
        )
        self.batches = Batches(
            config,
            state,
            self.scheduler,
            self.intake,
            self.evaluations,
            agent.peers,
            save=self.save,
            report=self._report,
            woken=woken,
        )

    async def save(self) -> None:
        """Write the state."""
        self.state.results_offset = self.scheduler.results_offset
        await self._file.save(self.state)
        self.agent.beat_soon()

    def detail(self) -> dict[str, Any]:
        """Return the explorer's level for its beat."""
        return {
            "open": list(self.state.tickets),
            "opened": self.state.opened,
            "closed": self.state.closed,
            "following": list(self.state.following.tickets),
            "total_batches": self.intake.total_batches,
            "counters": {
                "progress": self.batches.counters.progress,
                "committed_progress": self.batches.counters.committed_progress,
            },
            "evaluating": self.evaluations.running,
            "pending": len(self.state.pending),
            "ended": self.state.ended,
            "finished": self.state.finished,
        }

    async def background(self) -> list[Any]:
        """Return the coroutines that run beside :meth:`run`; what they need to be ready is."""
        agent = self.agent
        verbs = ("prepare", "go", "commit", "abort")
        ears = agent.topology.listener(agent.id, agent.incarnation, "sync", *(f"weights.{verb}" for verb in verbs))
        await agent.bus.declare(ears)
        feed = await agent.bus.consume(ears)
        agent.engine.on_change = self._engine_changed
        self._engine_changed()
        return [
            self.scheduler.run(),
            self.membership.run(feed, agent.each),
            agent.engine.keep(),
            self.evaluations.run(),
            self._close(),
            self._clock(),
            self._submissions(),
            self._forward(self.scheduler.changed),
            self._forward(self.membership.changed),
            self._follow_trainer(),
        ]

    async def run(self) -> None:
        """Open batches as the pacing allows; at the end evaluate the final weights."""
        agent, state = self.agent, self.state
        await self.scheduler.caught_up()
        await self.scheduler.resume()
        if self.config.explorer.eval_on_startup and not state.opened:
            self.evaluations.request(0)
            await agent.woken.until(lambda: self.evaluations.is_done(0) or agent.draining.is_set())
        while not self.intake.is_over and not agent.draining.is_set():
            obstacle = self.batches.obstacle(self.membership.version is not None)
            if obstacle is None:
                agent.set_state("working")
                await self.batches.open()
            else:
                agent.set_state("holding", obstacle)
                await agent.woken.wait()
        if agent.draining.is_set():
            await self._let_runners_finish()
            return
        await self._end()

    async def _end(self) -> None:
        agent, state = self.agent, self.state
        state.ended = True
        await self._turn_down_pending()
        end = envelope(RunEnd(batches=state.opened), message_id="run-end")
        await agent.bus.publish(agent.topology.exchange("ready"), "end", end)
        agent.set_state("working", "the last batches to be consumed")
        await agent.woken.until(lambda: self._has_final_weights() or agent.draining.is_set())
        self.evaluations.request(state.opened)
        agent.set_state("working", "the last evaluation")
        await agent.woken.until(lambda: self.evaluations.is_done(state.opened) or agent.draining.is_set())
        if not agent.draining.is_set():
            state.finished = True
            await self.save()

    async def _turn_down_pending(self) -> None:
        """Tell the submitters of tasks that no batch will take; every task ends in an outcome."""
        reason = "the run has opened its last batch"
        for one in self.state.pending:
            if one.submission is not None:
                told = SubmissionOutcome(
                    submission_id=one.submission.submission_id, batch="", ticket="", outcome="cancelled", message=reason
                )
                await self.scheduler.answer(one.submission, told)
        self.state.pending.clear()
        await self.save()

    def _has_final_weights(self) -> bool:
        trainer = self.agent.peers.detail("trainer")
        if not (trainer.get("finished") and self.batches.are_all_consumed):
            return False
        return self.membership.version == (trainer["generation"], trainer["step"])

    async def _let_runners_finish(self) -> None:
        """Keep the engine up while draining runners finish what they hold."""
        agent = self.agent
        agent.set_state("draining", "runners to finish")
        try:
            async with asyncio.timeout(self.config.runner.drain_timeout + CLOCK_TICK):
                await agent.woken.until(lambda: not agent.peers.alive("runner"))
        except TimeoutError:
            log.info("runners_left_behind")
        await self.save()

    # -- beside it

    async def _close(self) -> None:
        await self.scheduler.caught_up()
        while True:
            await self.agent.woken.until(self.batches.needs_attention)
            self.batches.check()
            await self.batches.close_complete()

    async def _clock(self) -> None:
        """Let the batches' time pass while they can move, and notice a run that does not."""
        agent = self.agent
        held = 0.0
        while True:
            await asyncio.sleep(CLOCK_TICK)
            if not (agent.bus.usable and self.scheduler.is_caught_up):
                continue
            if agent.peers.alive("runner") and agent.engine.snapshot.alive:
                await self.batches.tick(CLOCK_TICK)
            held = held + CLOCK_TICK if agent.state == "holding" else 0.0
            if held > self.config.explorer.stall_timeout:
                why = self.batches.obstacle(self.membership.version is not None)
                raise FatalError(
                    f"nothing has moved for {held:.0f} s (explorer.stall_timeout): waiting for {why}; the state is "
                    "saved"
                )

    async def _submissions(self) -> None:
        agent = self.agent
        async with await agent.bus.consume(agent.topology.submitted, prefetch=64) as feed:
            await agent.each(feed, self._submitted, expect=TaskSubmission)

    async def _submitted(self, message: TaskSubmission, delivery: Delivery) -> None:
        agent = self.agent
        ref = SubmissionRef(
            submission_id=message.submission_id or delivery.message_id or "",
            reply_to=delivery.reply_to,
            correlation_id=delivery.correlation_id,
            want_experiences=message.want_experiences,
        )
        if not ref.submission_id:
            await park(
                agent.bus, agent.topology, delivery, "a submission needs a submission_id or a message_id", agent.id
            )
            return
        if not self.intake.submit(message, ref):
            return
        if message.task.is_eval:
            one = ref.model_copy(update={"task_id": 0})
            task = self.intake.completed(message.task)
            batch = f"{self.state.closed}/submitted-{len(self.state.seen_submissions)}"
            await self.scheduler.open(
                self.scheduler.make_ticket([task], batch, deliver="none", lane="eval", submissions=[one])
            )
        await self.save()
        agent.woken.notify()

    async def _forward(self, changed: Any) -> None:
        while True:
            await changed.wait()
            self.agent.woken.notify()

    async def _follow_trainer(self) -> None:
        """Take the trainer's level from its beats: a lost event costs one beat."""
        while True:
            trainer = self.agent.peers.detail("trainer")
            if trainer.get("generation"):
                self.batches.heard(
                    trainer["generation"], progress=trainer.get("progress"), committed=trainer.get("committed_progress")
                )
            await self.agent.peers.changed.wait()

    def _engine_changed(self) -> None:
        """Tell the gate of an engine that has come, gone, or lost its weights by itself."""
        snapshot, membership = self.agent.engine.snapshot, self.membership
        if snapshot.alive and not membership.engine_ready:
            membership.engine_up(snapshot.version, snapshot.fingerprint or None)
        elif not snapshot.alive and membership.engine_ready:
            membership.engine_down()
        elif snapshot.state in {"empty", "dirty"} and membership.idle and membership.version is not None:
            membership.engine_up(None, snapshot.fingerprint or None)
        self.agent.woken.notify()

    def _committed(self) -> Version | None:
        committed = self.agent.peers.detail("trainer").get("committed")
        return (committed[0], committed[1]) if committed else None

    def _on_commit(self, version: Version | None, progress: int) -> None:
        self.batches.heard(version[0] if version else self.batches.generation, committed=progress)
        self.agent.beat_soon()

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(step, metrics)

    async def _publish_sync(self, event: SyncEvent) -> None:
        await self.agent.publish("sync", f"weights.{event.verb}", event)


def open_sets(
    config: Config, state_taskset: Mapping[str, Any] | None
) -> tuple[Taskset | None, dict[str, list[TaskBody]]]:
    """Return the training taskset, at its saved position, and the evaluation tasks by set."""
    training = config.buffer.taskset
    taskset = None
    if training.storage_type != "queue":
        taskset = open_taskset(training, repeat_times=config.algorithm.repeat_times, seed=config.seed)
        if state_taskset:
            taskset.restore(dict(state_taskset))
    sets = {
        one.name: open_taskset(one, repeat_times=one.repeat_times, seed=config.seed, is_eval=True).all_tasks()
        for one in config.buffer.eval_tasksets
    }
    return taskset, sets


def main(config: Config, agent_id: str = "explorer-0") -> int:
    """Run the scheduling explorer until the run is over; returns the exit code."""
    from trinity_mq.models import EngineHost, ensure_model_folder

    def build(bus: Bus, topology: Topology) -> Explorer:
        ensure_model_folder(config.model, config.path / "model", config.seed)
        saved = StateFile(config.path / "state" / "explorer.msgpack").load()
        taskset, sets = open_sets(config, saved.taskset)
        return Explorer(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            engine=EngineHost(config, config.path, f"{agent_id}-engine"),
            taskset=taskset,
            eval_sets=sets,
            metrics=MetricsWriter(config.path, "explorer", agent_id, config.monitor.tensorboard),
        )

    return run_daemon(config, agent_id, "explorer", build)
