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

from trinity_mq.bus import Bus, Lock, LockHeld, Topology
from trinity_mq.config import Config
from trinity_mq.data import Taskset, open_taskset
from trinity_mq.messages import Beat, TaskBody
from trinity_mq.runtime.agent import BEAT_LEASE, Agent
from trinity_mq.runtime.errors import RestartMe
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.exploration import Exploration
from trinity_mq.scheduling.intake import TaskSupply
from trinity_mq.scheduling.state import StateFile
from trinity_mq.telemetry import MetricsWriter

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.models import EngineHost

log = structlog.get_logger(__name__)

LOCK_RETRY = 2.0
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
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self.engine = engine
        self._file = StateFile((folder or config.path) / "state" / "explorer.msgpack")
        self._taskset, self._eval_sets = taskset, eval_sets or {}
        self.exploration: Exploration | None = None

    def detail(self) -> dict[str, Any]:
        """Return what runners, the trainer and the display need to know."""
        if self.exploration is not None:
            return self.exploration.detail()
        # while we wait: whoever asks for the explorer's level must not find an empty one in our beat
        others = [beat.detail for beat in self.peers.alive("explorer") if beat.id != self.id]
        return others[0] if others else {"open": [], "finished": False}

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
        # not before we hold the lock: the other explorer moved both on while we waited
        state = self._file.load()
        if self._taskset is not None and state.taskset:
            self._taskset.restore(state.taskset)
        state.incarnations += 1
        self.beat_seq = state.incarnations << 32  # beats of a later life always count as later
        self.exploration = Exploration(self, self.engine, state, self._file, self._taskset, self._eval_sets, lock=lock)
        if state.finished:
            self.set_state("finished")
            await asyncio.sleep(BEAT_LEASE)  # those that were started beside us must hear that there is nothing to do
            return
        try:
            await self.engine.start()
            background = await self.exploration.background()
            await self.with_background(self.explore(), self._stop_without_lock(lock), *background)
            await self.exploration.membership.leave()
            if state.finished:
                await self._see_off()
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

    async def _see_off(self) -> None:
        """Keep saying that the run is over until no trainer is left that might not have heard it, such as one that is
        being restarted.
        """
        try:
            async with asyncio.timeout(2 * BEAT_LEASE):
                await self.woken.until(lambda: all(beat.state == "finished" for beat in self.peers.alive("trainer")))
        except TimeoutError:
            log.warning("trainer_left_behind")

    async def _lock(self) -> Lock | None:
        """Return the run's lock; None when asked to drain or when the run has ended without us."""
        while not (self.draining.is_set() or self.detail()["finished"]):
            try:
                return await self.bus.lock(self.topology.lock("explorer"))
            except LockHeld:
                self.set_state("idle", "the other explorer of this run to end")
                await self.woken.wait(LOCK_RETRY)
        return None

    async def _stop_without_lock(self, lock: Lock) -> None:
        await lock.wait_lost()
        raise RestartMe("another explorer of this run has taken over while we were disconnected")


def open_sets(config: Config) -> tuple[Taskset | None, dict[str, list[TaskBody]]]:
    """Return the training taskset, at its beginning, and the evaluation tasks by set."""
    training = config.buffer.taskset
    taskset = None
    if training.storage_type != "queue":
        taskset = open_taskset(training, repeat_times=config.algorithm.repeat_times, seed=config.seed)
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
        taskset, sets = open_sets(config)
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
