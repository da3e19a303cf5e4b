"""Train batches of rollouts with added expert answers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from trinity_agents.trainer.sources.base import Source, TrainBatch
from trinity_agents.trainer.sources.records import RecordSource, read
from trinity_agents.trainer.sources.rollout_extension import RolloutExtension
from trinity_mq.config import Config
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.experience.eid import EID
from trinity_mq.training.packing import EXPERT


class MixSource(RolloutExtension):
    """Adds the same number of expert answers to every train step that has rollouts.

    The rollouts set the pace: expert answers are always available, and a step without rollouts consumes no answers.

    Args:
        rollouts: Source of rollouts, which sets the pace and counts progress.
        experts: Source of expert answers; each of its batches has the answers of one step.
    """

    def __init__(self, rollouts: Source, experts: RecordSource) -> None:
        super().__init__(rollouts)
        self._experts = experts
        self._first: TrainBatch | None = None
        """The batch of the current step to which the experts belong, None if the step has no rollouts."""

    async def next(self) -> TrainBatch:
        """Return the next rollouts. Expert answers are added to the step's first batch with rollouts, unless this batch
        is tried alone.
        """
        batch = await self._rollouts.next()
        first = next((part for part in batch.parts if part.experiences and not part.is_repaired), None)
        self._first = first
        if first is not None:
            experts = await self._experts.next()
        if first is not None and not first.is_alone:
            first.experiences = await asyncio.to_thread(_joined, first, experts)
            first.metrics |= experts.metrics
        return batch

    def consumed(self) -> None:
        """Advance past the rollouts, and past the expert answers of the step if the step has rollouts.

        A batch that was tried alone and not trained on does not consume expert answers.
        """
        self._rollouts.consumed()
        first, self._first = self._first, None
        if first is not None and not (first.is_alone and not first.trained):
            self._experts.consumed()

    def state(self) -> dict[str, Any]:
        """Return the state of the rollouts, which includes the position of the experts."""
        return {**self._rollouts.state(), "experts": self._experts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; begin at the first expert if the state has no position of experts."""
        self._rollouts.restore(state)
        if "experts" in state:
            self._experts.restore(state["experts"])


def experts_per_step(config: Config) -> int:
    """Return the number of expert answers in a train step. In a step with all rollouts, expert answers are the share
    ``expert_data_ratio`` of all experiences.
    """
    share = config.buffer.trainer_input.expert_data_ratio
    rollouts = config.buffer.batch_size * config.algorithm.repeat_times * config.trainer.batches_per_step
    return math.ceil(rollouts * share / (1 - share))


def open_experts(config: Config, codec: TextCodec) -> RecordSource | None:
    """Return the source of the run's expert answers, None for a run without experts.

    Raises:
        TasksetError: The records cannot be read, or no record can be used.
    """
    for data in config.buffer.trainer_input.auxiliary_buffers.values():
        records = read(data, codec, config.model.max_model_len)
        return RecordSource(data, records, seed=config.seed, size=experts_per_step(config), batches=ENDLESS)
    return None


ENDLESS = 1 << 62
"""Number of batches of experts: practically unlimited, because the rollouts set the pace."""


def _joined(rollouts: TrainBatch, experts: TrainBatch) -> ExperienceBatch:
    """Return rollouts and experts in one batch; experts get their own ids and the mark :data:`EXPERT`."""
    members: list[Experience] = []
    for experience in experts.experiences.to_shared_list():
        experience.eid = EID(rollouts.batch, f"expert-{experience.eid.task}", run=experience.eid.run, suffix="expert")
        experience.info = {**experience.info, EXPERT: True}
        members.append(experience)
    return ExperienceBatch.concat([rollouts.experiences, ExperienceBatch.of(members)])
