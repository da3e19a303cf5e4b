"""The explorer: tasks in, slices out, outcomes counted, batches closed; evaluates and hosts engines.

Waits for: committed weights (the pacing), outcomes on ``results``, and at the end the final weights for the last
evaluation.

:class:`EngineHosting` is what ``--engines-only`` starts: engines for the same run, without any scheduling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from trinity_agents.explorer.hosted_engines import HostedEngines
from trinity_agents.explorer.loop import ExplorerLoop
from trinity_agents.explorer.state import StateFile
from trinity_agents.explorer.task_source import TaskReader
from trinity_mq.bus import Bus, Lock, LockHeld, Topology
from trinity_mq.config import Config
from trinity_mq.data import Taskset, open_taskset
from trinity_mq.messages import EngineStatus, ExplorerStatus, Heartbeat, TaskBody
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.run_marker import mark_over
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.telemetry import MetricsWriter

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.models import EngineHost

log = structlog.get_logger(__name__)

LOCK_RETRY = 2.0
NAME_PATIENCE = 30.0
"""Seconds until the broker has noticed that a host of our name is gone."""


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
        engines: Sequence[EngineHost | Any] = (),
        auxiliaries: Sequence[EngineHost | Any] = (),
        folder: Path | None = None,
        taskset: TaskReader | None = None,
        eval_sets: Mapping[str, Sequence[TaskBody]] | None = None,
        metrics: MetricsWriter | None = None,
    ) -> None:
        topology = topology or Topology(config.name)
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self.engines = list(engines) or [engine]
        self.auxiliaries = list(auxiliaries)
        self._folder = folder or config.path
        self._file = StateFile(self._folder / "state" / "explorer.msgpack")
        self._taskset, self._eval_sets = taskset, eval_sets or {}
        self.exploration: ExplorerLoop | None = None

    def detail(self) -> ExplorerStatus:
        """Return what runners, the trainer and the display need to know."""
        if self.exploration is not None:
            return self.exploration.detail()
        # while we wait: whoever asks for the explorer's level must not find an empty one in our beat
        others = self.peers.statuses("explorer", ExplorerStatus, without=self.id)
        return others[0] if others else ExplorerStatus(open=[], finished=False)

    def hosted_heartbeats(self) -> list[Heartbeat]:
        """Return the engines' beats."""
        return [] if self.exploration is None else self.exploration.room.beats()

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
        self.heartbeat_seq = state.incarnations << 32  # beats of a later life always count as later
        self.exploration = ExplorerLoop(
            self,
            self.engines,
            state,
            self._file,
            self._taskset,
            self._eval_sets,
            auxiliaries=self.auxiliaries,
            lock=lock,
        )
        room = self.exploration.room
        if state.finished:
            self.set_state("finished")
            await self._mark_over()
            await asyncio.sleep(
                HEARTBEAT_LEASE
            )  # those that were started beside us must hear that there is nothing to do
            return
        try:
            await room.start()
            background = await self.exploration.background()
            await self.with_background(self.explore(), self._stop_without_lock(lock), *background)
            await room.leave()
            if state.finished:
                await self._mark_over()
                await self._see_off()
        finally:
            # a drained or finished run needs no engines; those whose explorer failed are adopted by the next
            await room.close(stop=self.draining.is_set() or state.finished)

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
        """Have every engine hosted here meet rank 0 at ``master_address:master_port`` and take one broadcast of the
        tensors in ``state_dict_meta``.

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
            "world": len(self.engines) + 1,
            "seconds": sync.sync_timeout,
            "manifest": list(state_dict_meta or []),
            "canary": {},
        }

        async def take(rank: int, engine: EngineHost | Any) -> None:
            await engine.pause(sync.sync_timeout)
            await engine.receive({**spec, "rank": rank}, sync.sync_timeout + 5.0)

        async with asyncio.TaskGroup() as group:
            for rank, engine in enumerate(self.engines, start=1):
                group.create_task(take(rank, engine))

    async def get_weight(self, name: str) -> Tensor:
        """Return one weight as the engine holds it, on the CPU."""
        from safetensors.torch import load

        weight: Tensor = load(await self.engines[0].weight(name))[name]
        return weight

    async def _mark_over(self) -> None:
        """Leave word for those that are being started just now and will not hear us."""
        await asyncio.to_thread(mark_over, self._folder)

    async def _see_off(self) -> None:
        """Keep saying that the run is over until no trainer is left that might not have heard it, such as one that is
        being restarted.
        """
        try:
            async with asyncio.timeout(2 * HEARTBEAT_LEASE):
                await self.woken.until(lambda: all(beat.state == "finished" for beat in self.peers.alive("trainer")))
        except TimeoutError:
            log.warning("trainer_left_behind")

    async def _lock(self) -> Lock | None:
        """Return the run's lock; None when asked to drain or when the run has ended without us."""
        while not (self.draining.is_set() or self.detail().finished):
            try:
                return await self.bus.lock(self.topology.lock("explorer"))
            except LockHeld:
                self.set_state("idle", "the other explorer of this run to end")
                await self.woken.wait(LOCK_RETRY)
        return None

    async def _stop_without_lock(self, lock: Lock) -> None:
        await lock.wait_lost()
        raise RestartMe("another explorer of this run has taken over while we were disconnected")


class EngineHosting(Agent):
    """Hosts engines for a run whose explorer is elsewhere; any number of these, each under a name of its own."""

    role = "engine"

    def __init__(
        self, config: Config, *, bus: Bus, topology: Topology, agent_id: str, engines: Sequence[EngineHost | Any]
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self.room = HostedEngines(self, engines)

    def detail(self) -> EngineStatus:
        """Return whose host it is; without a URL nobody takes it for an engine."""
        return EngineStatus(hosts=[engine.snapshot.id for engine in self.room.engines])

    def hosted_heartbeats(self) -> list[Heartbeat]:
        """Return the engines' beats."""
        return self.room.beats()

    async def serve(self) -> None:
        """Keep the engines up and in the gate until drained or the run is over.

        Raises:
            FatalError: A host of the same name lives.
        """
        lock = await self._lock()
        if lock is None or self._is_over():
            return
        try:
            self.set_state("starting", "its engines")
            await self.room.start()
            self.set_state("working")
            background = await self.room.background()
            await self.with_background(self.woken.until(self._is_over), self._stop_without_lock(lock), *background)
            await self.room.leave()
        finally:
            await self.room.close(stop=self._is_over())

    def _is_over(self) -> bool:
        return self.draining.is_set() or self.peers.explorer.finished

    async def _lock(self) -> Lock | None:
        """Return what makes our name, and so the names of our engines, ours alone; None when asked to drain."""
        until = asyncio.get_running_loop().time() + NAME_PATIENCE
        while not self._is_over():
            try:
                return await self.bus.lock(self.topology.lock(self.id))
            except LockHeld:
                if asyncio.get_running_loop().time() > until:
                    raise FatalError(
                        f"another host of engines of this run is called {self.id!r}, and so would its engines be; "
                        "start this one with another --id"
                    ) from None
                self.set_state("holding", f"the other host called {self.id} to end")
                await self.woken.wait(LOCK_RETRY)
        return None

    async def _stop_without_lock(self, lock: Lock) -> None:
        await lock.wait_lost()
        raise RestartMe("we were disconnected, and another host of our name may have taken over")


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
    from trinity_mq.models import ensure_model_folder
    from trinity_mq.models.engines.host.host import auxiliary_hosts, rollout_hosts

    def build(bus: Bus, topology: Topology) -> Explorer:
        ensure_model_folder(config.model, config.path / "model", config.seed)
        taskset, sets = open_sets(config)
        return Explorer(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            engines=rollout_hosts(config, agent_id),
            auxiliaries=auxiliary_hosts(config, agent_id),
            taskset=taskset,
            eval_sets=sets,
            metrics=MetricsWriter(config.path, "explorer", agent_id, config.monitor.tensorboard),
        )

    return run_daemon(config, agent_id, "explorer", build)


def host_engines(config: Config, agent_id: str) -> int:
    """Host ``explorer.rollout_model.engine_num`` engines until the run is over; returns the exit code."""
    from trinity_mq.models import ensure_model_folder
    from trinity_mq.models.engines.host.host import rollout_hosts

    def build(bus: Bus, topology: Topology) -> EngineHosting:
        ensure_model_folder(config.model, config.path / "model", config.seed)
        engines = rollout_hosts(config, agent_id)
        return EngineHosting(config, bus=bus, topology=topology, agent_id=agent_id, engines=engines)

    return run_daemon(config, agent_id, "engine", build)
