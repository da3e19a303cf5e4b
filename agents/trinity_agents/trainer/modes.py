"""The trainer in the modes that do not train: ``bench`` and ``explore``.

Mode ``bench`` (:class:`CheckpointServer`) sends the engines the weights of the checkpoint that the explorer evaluates
next. It keeps no state: after a restart it serves the checkpoint that the explorer requests.
Input: the explorer's heartbeats, which name the checkpoint.
Output: weight syncs, and the weight version in its own heartbeats.
Waits for: the explorer's next checkpoint.

Mode ``explore`` is the usual trainer with :class:`RecordingLearner`, which writes the experiences to a sink and never
changes the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from trinity_agents.trainer.pinning import wait_for_evaluation
from trinity_mq.bus import Bus, Topology
from trinity_mq.config import AlgorithmConfig, Config
from trinity_mq.data.storage import ExperienceSink
from trinity_mq.experience import Experience
from trinity_mq.messages import SyncEvent, TrainerStatus
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import FatalError
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.gate.canary import FIRST_IDS
from trinity_mq.sync.gate.coordinator_driver import CoordinatorDriver, Weights
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, CheckpointStore, DamagedCheckpointError, verify
from trinity_mq.training.learner import Learner
from trinity_mq.training.update import WRITTEN

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.training.checkpoints.checkpoint import Writer

log = structlog.get_logger(__name__)

SYNC_VERBS = ("join", "leave", "ready", "applied", "failed")
"""Events of engines that the leader of a sync follows."""

NOTE = "recorded.txt"
"""File in a checkpoint folder: names the sink that has the experiences up to this checkpoint."""


class WeightReader(Weights, Protocol):
    """Holds the weights of one checkpoint after another."""

    async def take_weights(self, checkpoint: Path | None) -> None:
        """Load the weights of a checkpoint, or of the initial model (None)."""

    async def close(self) -> None:
        """Release all resources."""


class CheckpointServer(Agent):
    """The trainer of a run that evaluates checkpoints.

    Args:
        config: The run's configuration.
        bus: A bus that is not connected yet.
        topology: Names of the run's queues and exchanges.
        agent_id: This agent's id.
        reader: Loads the weights of a checkpoint.
        checkpoints: Returns the checkpoints that exist now, by label; the value of the initial model is None.
        channel: Carries weights to the engines.
        metrics: Writes metrics.
        fingerprint: Fingerprint of the tokenizer and the chat template, which must be the same in all engines.
        canary: Token ids of the canary prompt.
    """

    role = "trainer"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str,
        reader: WeightReader,
        checkpoints: Callable[[], Mapping[int, Checkpoint | None]],
        channel: Channel,
        metrics: MetricsWriter | None = None,
        fingerprint: str | None = None,
        canary: Sequence[int] = FIRST_IDS,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self._reader, self._checkpoints = reader, checkpoints
        self.generation = 0
        self.step = 0
        """Number of checkpoints loaded so far, which is the step of the current weight version."""
        self.label: int | None = None
        """Label of the checkpoint whose weights are loaded."""
        self.gate = CoordinatorDriver(
            name=self.id,
            config=config.synchronizer,
            dtype=config.model.dtype,
            weights=reader,
            channel=channel,
            canary=canary[: config.model.max_model_len],
            publish=self._publish_sync,
            may_begin=lambda: wait_for_evaluation(self, self.gate.machine),
            fingerprint=fingerprint,
        )

    def detail(self) -> TrainerStatus:
        """Return the loaded version and the state of the engines. Until this agent has the lock, they are the active
        trainer's.
        """
        if not self.generation and (others := self.peers.statuses("trainer", TrainerStatus, without=self.id)):
            return others[0]
        machine = self.gate.machine
        return TrainerStatus(
            generation=self.generation,
            step=self.step,
            progress=self.step,
            answered=self.label,
            committed=machine.committed,
            committed_progress=machine.committed_progress,
            epoch=machine.epoch,
            phase=self.gate.phase,
            members=sorted(machine.members),
            sync=self.gate.report(),
        )

    async def serve(self) -> None:
        """Take the lock, then serve checkpoints until the run is over or this agent is drained."""
        if not await self.take_lock("trainer", "idle", "the other trainer of this run to end", until=self._is_over):
            return
        queue = self.topology.listener(self.id, self.incarnation, "sync", *(f"weights.{verb}" for verb in SYNC_VERBS))
        await self.bus.declare(queue)
        store = CheckpointStore(self.config.path / "checkpoints", 1)  # only counts generations, saves nothing
        self.generation = await asyncio.to_thread(store.next_generation)
        try:
            async with await self.bus.consume(queue) as feed:
                self.heartbeat_now()  # an engine that this heartbeat does not list as a member joins now
                await self.run_with_background(
                    self._present(), self.gate.run(feed, self.each), self._follow_gate(), self.restart_when_lock_lost()
                )
        finally:
            await self._reader.close()

    async def _present(self) -> None:
        while not self._is_over():
            explorer = self.peers.explorer
            if explorer.opened and explorer.wants != self.label:
                await self._load_checkpoint(explorer.wants or 0)
            elif self.step and (self.gate.needs_full_sync or self.gate.machine.committed != self._version):
                await self._sync()
            else:
                self.set_state("idle", "the explorer to ask for a checkpoint")
                await self.woken.wait()

    @property
    def _version(self) -> tuple[int, int]:
        return (self.generation, self.step)

    async def _load_checkpoint(self, label: int) -> None:
        self.set_state("working", f"checkpoint {label} to be read")
        there = await asyncio.to_thread(self._checkpoints)
        if label not in there:
            raise FatalError(
                f"the explorer asks for checkpoint {label}, which is not in {self.config.bench.run} any more. Start "
                "again to continue with the checkpoints that are there; trainer.max_checkpoints_to_keep of that run "
                "says how many are kept"
            )
        checkpoint = there[label]
        try:
            if checkpoint is not None:
                await asyncio.to_thread(verify, checkpoint)
            await self._reader.take_weights(None if checkpoint is None else checkpoint.path)
        except DamagedCheckpointError as error:
            raise FatalError(
                f"checkpoint {label} of {self.config.bench.run} cannot be evaluated: {error}. Leave it out with "
                "bench.checkpoints; the results of the other checkpoints are kept"
            ) from error
        self.label, self.step = label, self.step + 1
        log.info("checkpoint_loaded", label=label, step=self.step)
        self.heartbeat_now()

    async def _sync(self) -> None:
        self.set_state("working" if self.gate.has_members else "holding", "engines to take the weights")
        began = asyncio.get_running_loop().time()
        if await self.woken.unless(self._is_over, self.gate.sync(self._version, self.step)):
            self.report(self.step, {"time/sync": asyncio.get_running_loop().time() - began, **self.gate.metrics()})
        await self.gate.settled()
        self.heartbeat_now()

    async def _follow_gate(self) -> None:
        while True:
            await self.gate.changed.wait()
            self.woken.notify()
            self.heartbeat_soon()

    def _is_over(self) -> bool:
        return self.draining.is_set() or self.peers.explorer.finished

    async def _publish_sync(self, event: SyncEvent) -> None:
        await self.publish("sync", f"weights.{event.verb}", event)


def weights_only_config(config: Config) -> Config:
    """Return a configuration that only loads the policy's weights, without a reference model and a critic."""
    plain = AlgorithmConfig.model_validate({"algorithm_type": "rloo"})
    return config.model_copy(update={"algorithm": plain})


class RecordingLearner:
    """A learner that writes the experiences of batches to a sink and never changes the weights. After a crash it writes
    the batches after the trainer's checkpoint again, which overwrites them.

    Args:
        learner: Holds the weights that the engines get.
        sink: Takes the experiences.
    """

    def __init__(self, learner: Learner, sink: ExperienceSink) -> None:
        self._learner, self._sink = learner, sink

    async def open(self, checkpoint: Path | None) -> None:
        """Load the configured model and ignore ``checkpoint``, because these checkpoints hold no weights."""
        await self._learner.open(None)

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Write the experiences, grouped by the batch number in their ids.

        Raises:
            SinkError: The experiences cannot be written.
        """
        by_batch: dict[int, list[Experience]] = {}
        for experience in experiences:
            by_batch.setdefault(int(experience.eid.batch), []).append(experience)
        for batch, members in by_batch.items():
            await asyncio.to_thread(self._sink.write, batch, members)
        return {"actor/optimizer_steps": 0.0, WRITTEN: float(len(experiences))}

    async def save(self, folder: Path) -> None:
        """Write the file :data:`NOTE`, which names the sink."""
        await asyncio.to_thread((folder / NOTE).write_text, f"written to {self._sink.title}\n")

    async def stage(self) -> Writer:
        """Return :meth:`save`: no state changes while the checkpoint is written."""
        return self.save

    async def export(self, folder: Path) -> None:
        """Write the model, which is still the initial model of the run."""
        await self._learner.export(folder)

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return the weights' names, dtypes and shapes."""
        return await self._learner.manifest()

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights."""
        return await self._learner.weights()

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]``."""
        return await self._learner.canary_logprobs(tokens)

    async def close(self) -> None:
        """Close the sink and the model."""
        await asyncio.to_thread(self._sink.close)
        await self._learner.close()
