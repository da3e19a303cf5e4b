"""The explorer agent.

Input: tasks of the taskset and submitted tasks, outcomes on ``results``, the trainer's progress.
Output: task slices, manifests of closed batches, answers to submitters and evaluation metrics. The explorer also hosts
rollout engines.
Waits for: committed weights (the pacing), outcomes, and at the end the final weights for the last evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import structlog

from trinity_agents.explorer.hosted_engines import receive_broadcast
from trinity_agents.explorer.loop import ExplorerLoop
from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.explorer.task_source import TaskReader, open_tasksets
from trinity_mq.bus import Bus, Queue, Topology, create_bus
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.config import Config
from trinity_mq.messages import ExplorerStatus, Heartbeat, TaskBody
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.runtime.expected_errors import single_error
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.runtime.process import (
    claim_folder,
    claimed_run_id,
    mark_run_over,
    other_run_error,
    read_run_id,
    unmark_run_over,
    write_run_id,
)
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.training.checkpoints.benchmarked import checksums

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.engines.host.host import EngineHost


log = structlog.get_logger(__name__)


class _Parts(TypedDict):
    engines: Sequence[EngineHost]
    auxiliaries: Sequence[EngineHost]
    taskset: TaskReader | None
    eval_sets: Mapping[str, Sequence[TaskBody]]
    metrics: MetricsWriter


class Explorer(Agent):
    """The explorer that schedules the tasks of a run; ``await Explorer(config).explore()`` does all of its work.

    Args:
        config: The run's configuration.
        bus: A bus that is not connected yet; closed at the end. None: the bus (``broker.url``), taskset, evaluation
            sets, engines and metrics are made from the configuration, and the arguments below for these are ignored.
        topology: Names of the run's queues and exchanges; by default made from the configuration.
        agent_id: This agent's id.
        engine: Host of a single rollout engine.
        engines: Hosts of several rollout engines, instead of ``engine``.
        auxiliaries: Hosts of auxiliary engines.
        folder: Folder of the state; by default the run's folder.
        taskset: Source of the training tasks; None: only submitted tasks.
        eval_sets: Evaluation tasks by set.
        metrics: Writes metrics. None: no metrics are written.

    Raises:
        AddressError: ``bus`` is None and the configuration has no usable broker address.
    """

    role = "explorer"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus | None = None,
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
        topology = topology or Topology.of(config)
        if bus is None:
            bus = create_bus(config.broker, topology, agent_id)
            add_plugins(config.plugin_dirs)
            parts = _configured(config, agent_id)
            engines, auxiliaries, metrics = parts["engines"], parts["auxiliaries"], parts["metrics"]
            taskset, eval_sets = parts["taskset"], parts["eval_sets"]
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self.engines = list(engines) or [engine]
        self.auxiliaries = list(auxiliaries)
        self._folder = folder or config.path
        self._file = StateFile.of(self._folder)
        self._taskset, self._eval_sets = taskset, eval_sets or {}
        self.exploration: ExplorerLoop | None = None

    def detail(self) -> ExplorerStatus:
        """Return the status for runners, the trainer and the display. Until this explorer has the lock, it is the
        status of the active explorer.
        """
        if self.exploration is not None:
            return self.exploration.detail()
        # While this explorer waits for the lock, it reports the active explorer's state instead of an empty state.
        others = [status for status in self.peers.statuses("explorer", ExplorerStatus) if status.run_id]
        # Only the explorer that schedules announces the id of the run.
        return others[0].model_copy(update={"run_id": ""}) if others else ExplorerStatus(open=[], finished=False)

    def follow_run(self, explorer: ExplorerStatus) -> None:
        """Do nothing: the id of the run is in the saved state."""

    def _check_run(self) -> None:
        """Check that the explorers in the heartbeats belong to the run in this folder.

        An explorer writes its run id to the folder before it announces the id.

        Raises:
            FatalError: An explorer belongs to another run.
        """
        for status in self.peers.statuses("explorer", ExplorerStatus):
            if status.run_id in {"", read_run_id(self._folder)}:
                continue
            if status.run_id != StateFile.of(self._folder).load().run_id:  # release 0.1.0 keeps the id only here
                raise other_run_error(self.topology.run, self._folder, "explorer", status.run_id, status.place)

    def hosted_heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of the hosted engines, which begin once this explorer has the lock."""
        return [] if self.exploration is None else self.exploration.hosted.heartbeats()

    async def serve(self) -> None:
        """Take the run's lock, then explore until the run is over or this agent is drained."""
        claim_folder(self._folder)

        def gives_up() -> bool:
            self._check_run()
            return self._is_over()

        if not await self.take_lock("explorer", "idle", "the other explorer of this run to end", until=gives_up):
            return
        state = self._file.load()  # with the lock, because another explorer may have changed the state before
        state.mark_gateways(self.topology.sessions.name)
        if not state.run_id:
            await begin_run(state, self.bus, self.topology, claimed_run_id(self._folder))
        self.bus.run_id = state.run_id
        state.incarnations += 1
        sources = self._taskset, self._eval_sets, await asyncio.to_thread(checksums, self.config)
        exploration = ExplorerLoop(self, self.engines, self.auxiliaries, state, self._file, *sources)
        # The state is saved before a heartbeat has the new sequence number: if this process sent a heartbeat and was
        # killed before the save, the next process would use the same numbers. The loop is created first, because a save
        # moves the observations that the loop reads from the state into the file.
        await self._file.save(state)
        write_run_id(self._folder, state.run_id)
        self.heartbeat_seq = state.incarnations << 32  # heartbeats of a later process always have higher numbers
        self.exploration = exploration
        if state.finished:
            self.set_state("finished")
            await asyncio.to_thread(mark_run_over, self._folder)
            await asyncio.sleep(HEARTBEAT_LEASE)  # agents that started at the same time need to receive the end
            return
        await asyncio.to_thread(unmark_run_over, self._folder)  # a finished run may have been extended
        hosted = self.exploration.hosted
        try:
            await hosted.start()
            background = await self.exploration.background()
            await self.run_with_background(self.exploration.run(), self.restart_when_lock_lost(), *background)
            await hosted.leave()
            if state.finished:
                await asyncio.to_thread(mark_run_over, self._folder)  # agents that start later see the mark
                await self.exploration.announce_end()
        finally:
            # A drained or finished run needs no engines; after a failure the next explorer adopts the engines.
            await hosted.close(stop=self.draining.is_set() or state.finished)

    async def explore(self) -> str:
        """Run the explorer to the end of the run and return the explorer's id; the documented name of :meth:`run`.

        The explorer connects to the bus, opens, follows and closes batches, evaluates, and closes the bus at the end.
        A period with style ``fixed`` and interval n::

            explorer | step 1 | step 2 | ... | step n | eval | sync |
            trainer  | idle   | step 1 | step 2 | ...  | step n | sync |

        Raises:
            Exception: The error that ended the explorer. Further errors of concurrent tasks are in its notes.
        """
        try:
            await self.run()
        except BaseExceptionGroup as group:
            failure = single_error(group)
        else:
            return self.id
        raise failure  # outside of the handler: the group would be printed as its context

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> None:
        """Connect each hosted rollout engine to rank 0 and receive one broadcast of the tensors in ``state_dict_meta``.

        Args:
            master_address: Address of the sender's TCPStore.
            master_port: Port of the sender's TCPStore.
            state_dict_meta: ``(name, dtype, shape)`` of each tensor, in the order of the broadcast.
        """
        await receive_broadcast(self.engines, self.config, master_address, master_port, state_dict_meta or ())

    async def get_weight(self, name: str) -> Tensor:
        """Return the weight ``name`` of the first rollout engine, as a CPU tensor."""
        from safetensors.torch import load

        weight: Tensor = load(await self.engines[0].weight(name))[name]
        return weight

    def _is_over(self) -> bool:
        return self.draining.is_set() or self.detail().finished


def _configured(config: Config, agent_id: str) -> _Parts:
    """Create the engine hosts, tasksets and metrics writer of a configuration, and the model's folder if missing."""
    from trinity_mq.engines.host.host import auxiliary_hosts, rollout_hosts
    from trinity_mq.models import ensure_model_folder

    ensure_model_folder(config.model, config.path / "model", config.seed)
    taskset, eval_sets = open_tasksets(config)
    return _Parts(
        engines=rollout_hosts(config, agent_id),
        auxiliaries=auxiliary_hosts(config, agent_id),
        taskset=taskset,
        eval_sets=eval_sets,
        metrics=MetricsWriter(config.path, "explorer", agent_id, config.monitor.tensorboard),
    )


def main(config: Config, agent_id: str = "explorer-0") -> int:
    """Run the explorer that schedules until the run is over or the process is drained; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Explorer:
        return Explorer(config, bus=bus, topology=topology, agent_id=agent_id, **_configured(config, agent_id))

    return run_daemon(config, agent_id, "explorer", build)


async def begin_run(state: ExplorerState, bus: Bus, topology: Topology, run_id: str) -> None:
    """Set the unique run id in the state. In a fresh state, also set the offsets after the present content of the
    streams, and the number of messages that earlier runs left on the broker.

    In a state that an older release saved, only the run id is set.
    """
    state.run_id = run_id
    if state.incarnations:
        return
    state.results_offset = await _end(bus, topology.results)
    state.ready_offset = await _end(bus, topology.ready)
    work = (topology.tasks_train, topology.tasks_eval, topology.closed)
    waiting = [await bus.depth(queue.name) or 0 for queue in work]
    # Only the results stream is counted, because a trainer that has just started may have put its mark on the ready
    # stream. 1 is subtracted for the mark that _end publishes.
    state.left_over = state.results_offset - 1 + sum(waiting)
    if state.left_over:
        log.warning(
            "earlier_run_on_the_broker", run=topology.run, messages=state.left_over, reason="this run ignores them"
        )


async def _end(bus: Bus, stream: Queue) -> int:
    """Publish a mark on a stream and return the offset after the mark, which follows all present messages."""
    end = 0
    async for delivery in read_up_to_now(bus, stream, new_mark()):
        assert delivery.offset is not None
        end = delivery.offset + 1
    return end
