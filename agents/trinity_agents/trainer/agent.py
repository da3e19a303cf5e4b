"""The trainer agent.

Input: processed batches of the ``ready`` stream; in mode ``train`` records, or processed batches of another run's
stream. Each batch is one unit of progress, however many experiences it holds.
Output: train steps, checkpoints, progress events and weights for the engines. The trainer leads the weight sync.
Waits for: the next batch, an engine that needs weights, and at the end the explorer's last evaluation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from trinity_agents.trainer.card import ColocatedLearner
from trinity_agents.trainer.loop import TrainLoop
from trinity_agents.trainer.modes import SYNC_VERBS, CheckpointServer, RecordingLearner, weights_only_config
from trinity_agents.trainer.sources.base import Source
from trinity_agents.trainer.sources.mix import open_experts
from trinity_agents.trainer.sources.records import RecordSource, open_records
from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.data.storage import open_output
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.messages import ExplorerStatus, TrainerStatus
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import EXIT_FATAL, EXIT_RESTART, DeviceMemoryError, RestartRequested
from trinity_mq.runtime.gpus import visible_devices
from trinity_mq.runtime.placement import trainer_environment
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.runtime.process import (
    ensure_trainer_id,
    keep_freed_memory,
    mark_run_over,
    other_run_error,
    place,
    read_trainer_id,
)
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.gate.canary import FIRST_IDS, canary_tokens
from trinity_mq.telemetry import MetricsWriter, setup_logging
from trinity_mq.training.checkpoints.benchmarked import select_checkpoints
from trinity_mq.training.learner import Learner, TorchLearner
from trinity_mq.training.parallel.ranks import (
    RankProcesses,
    Ranks,
    begin_follower,
    is_started_by_torchrun,
    own_device,
    own_rank,
    world_size,
)

log = structlog.get_logger(__name__)


class Trainer(Agent):
    """The trainer of a run in any mode except ``bench``; a lock allows one active trainer per run."""

    role = "trainer"

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
        ranks: RankProcesses | None = None,
        canary: Sequence[int] = FIRST_IDS,
        source: Source | None = None,
        experts: RecordSource | None = None,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self.ranks = ranks or RankProcesses(Ranks())
        self._where: dict[str, str] = {}
        """Heartbeat fields that identify the run folder; empty while another trainer has the lock."""
        self.loop = TrainLoop(
            self,
            learner,
            channel,
            folder=folder or config.path,
            fingerprint=fingerprint,
            canary=canary,
            source=source,
            experts=experts,
        )

    def detail(self) -> TrainerStatus:
        """Return the counters that pace the other agents. Until this trainer has the lock, they are the counters of the
        active trainer, if there is an active trainer.
        """
        if not self.loop.generation:
            # While this trainer waits for the lock, it reports the active trainer's state instead of an empty state.
            others = [status for status in self.peers.statuses("trainer", TrainerStatus) if status.generation]
            if others:
                return others[0]
        return self.loop.detail().model_copy(update=self._where)

    def _check_folder(self) -> None:
        """Check that the trainers in the heartbeats use this run folder.

        Raises:
            FatalError: A trainer uses another folder, so its checkpoints are not in this folder.
        """
        for status in self.peers.statuses("trainer", TrainerStatus):
            if status.folder_id and status.folder_id != read_trainer_id(self.loop.folder):
                raise other_run_error(self.topology.run, self.loop.folder, "trainer", "", status.place)

    def follow_run(self, explorer: ExplorerStatus) -> None:
        """Adopt the run of the explorer that schedules.

        Raises:
            FatalError: The checkpoints belong to another run.
            RestartRequested: This process trains another run.
        """
        self.loop.check_run(explorer.run_id)
        super().follow_run(explorer)
        self.loop.source.run_begins(explorer.ready_offset)

    async def serve(self) -> None:
        """Take the lock, then train until the run is over or this agent is drained."""
        loop = self.loop

        def gives_up() -> bool:
            self._check_folder()
            return self._is_over()

        if not await self.take_lock("trainer", "idle", "the other trainer of this run to end", until=gives_up):
            return
        self._where = {"folder_id": ensure_trainer_id(loop.folder), "place": place(loop.folder)}
        queue = self.topology.listener(self.id, self.incarnation, "sync", *(f"weights.{verb}" for verb in SYNC_VERBS))
        await self.bus.declare(queue)
        try:
            await self.ranks.start()
            await self.run_with_background(loop.restore(), self.ranks.watch())
            async with await self.bus.consume(queue) as feed:
                self.heartbeat_now()  # an engine that this heartbeat does not list as a member joins now
                await self.run_with_background(
                    loop.run(),
                    self.ranks.watch(),
                    loop.source.run(),
                    loop.saver.run(),
                    loop.gate.run(feed, self.each),
                    loop.watch_gate(),
                    loop.withdraw_attempt(),
                    self.restart_when_lock_lost(),
                )
            if self.config.mode == "train" and loop.finished:
                await asyncio.to_thread(mark_run_over, loop.folder)  # a later start has no work left
        finally:
            await loop.close()
            await self.ranks.end()

    def _is_over(self) -> bool:
        return self.draining.is_set() or self.loop.is_run_over


def main(config: Config, agent_id: str = "trainer-0") -> int:
    """Run the trainer, in mode ``bench`` a :class:`CheckpointServer`, until the run is over or the process is drained;
    in a process of a rank above 0, run that rank until rank 0 ends. Return the exit code.
    """
    keep_freed_memory()
    world = world_size(config.trainer.nproc)
    if own_rank():
        return run_follower_rank(config, agent_id, world)
    if not is_started_by_torchrun():  # torchrun's processes choose a GPU by their local rank
        os.environ.update(trainer_environment(config, agent_id))

    def build(bus: Bus, topology: Topology) -> Agent:
        model = ensure_model_folder(config.model, config.path / "model", config.seed)
        ranks = Ranks(0, world, config.trainer.rank_timeout)
        codec = TextCodec.of_model(model, config.model)
        if config.mode == "bench":
            return CheckpointServer(
                config,
                bus=bus,
                topology=topology,
                agent_id=agent_id,
                reader=TorchLearner(weights_only_config(config), model, None),
                checkpoints=partial(select_checkpoints, config),
                channel=open_channel(config),
                metrics=MetricsWriter(config.path, "trainer", agent_id, config.monitor.tensorboard),
                fingerprint=codec.fingerprint(),
                canary=canary_tokens(codec),
            )
        source: Source | None = None
        if config.mode == "train":
            tapped = bool(config.source.tap)
            source = TapSource(config, bus, topology, agent_id, codec) if tapped else open_records(config, codec)
        torch_learner = TorchLearner(config, model, config.train_steps if source is None else source.ended, ranks)
        canary = canary_tokens(codec)
        learner: Learner = torch_learner
        if config.synchronizer.colocated:
            learner = ColocatedLearner(torch_learner, config.path, canary[: config.model.max_model_len])
        if config.mode == "explore":
            learner = RecordingLearner(learner, open_output(config.buffer.explorer_output, config.path))
        return Trainer(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            learner=learner,
            channel=open_channel(config),
            metrics=MetricsWriter(config.path, "trainer", agent_id, config.monitor.tensorboard),
            fingerprint=codec.fingerprint(),
            canary=canary,
            ranks=RankProcesses(ranks),
            source=source,
            experts=open_experts(config, codec),
        )

    return run_daemon(config, agent_id, "trainer", build)


def run_follower_rank(config: Config, agent_id: str, world: int) -> int:
    """Run a rank above 0, which executes the commands of rank 0; returns the exit code."""
    begin_follower()
    rank = own_rank()
    setup_logging(
        "trainer",
        f"{agent_id}-rank-{rank}",
        config.path,
        config.monitor.log_level,
        run=config.name,
        max_bytes=config.monitor.log_max_bytes,
    )
    log.info("process_starts", devices=visible_devices(), device=own_device(0))
    add_plugins(config.plugin_dirs)
    model = ensure_model_folder(config.model, config.path / "model", config.seed)
    total = config.train_steps
    if config.mode == "train" and not config.source.tap:
        total = open_records(config, TextCodec.of_model(model, config.model)).ended
    learner = TorchLearner(config, model, total, Ranks(rank, world, config.trainer.rank_timeout))
    try:
        learner.follow()
    except DeviceMemoryError as error:
        log.error("rank_ends", rank=rank, reason=str(error))
        return EXIT_FATAL
    except RestartRequested as error:
        log.warning("rank_ends", rank=rank, reason=str(error))
        return EXIT_RESTART
    return 0
