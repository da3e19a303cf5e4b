"""Train batches of rollouts with expert answers beside them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from trinity_agents.trainer.sources.base import Source, TrainBatch
from trinity_agents.trainer.sources.beside import BesideRollouts
from trinity_agents.trainer.sources.records import RecordSource, read
from trinity_mq.config import Config
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.experience.eid import EID
from trinity_mq.models.engines.generation.text import TextCodec
from trinity_mq.training.packing import EXPERT


class MixSource(BesideRollouts):
    """Adds the same number of expert answers to every train step that has rollouts. The rollouts set the pace: experts
    are always there, and a batch without rollouts takes none of them.

    Args:
        rollouts: Paces, and counts progress.
        experts: Gives a step's answers with each batch.
    """

    def __init__(self, rollouts: Source, experts: RecordSource) -> None:
        super().__init__(rollouts)
        self._experts = experts
        self._first: TrainBatch | None = None
        """The batch of the step that experts belong to."""

    async def next(self) -> TrainBatch:
        """Return the next rollouts, with experts beside those of the first batch that has any, unless it is tried
        alone.
        """
        batch = await self._rollouts.next()
        first = next((one for one in (batch, *batch.co_batched) if one.experiences), None)
        self._first = first
        if first is not None:
            experts = await self._experts.next()
        if first is not None and not first.is_alone:
            first.experiences = await asyncio.to_thread(_joined, first, experts)
            first.metrics |= experts.metrics
        return batch

    def consumed(self) -> None:
        """Move on, behind the experts too if the step had some, or survived without those that would have come."""
        self._rollouts.consumed()
        first, self._first = self._first, None
        if first is not None and not (first.is_alone and first.outcome != "trained"):
            self._experts.consumed()

    def state(self) -> dict[str, Any]:
        """Return the state of the rollouts, and the experts' position in it."""
        return {**self._rollouts.state(), "experts": self._experts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; at the first expert where there were none then."""
        self._rollouts.restore(state)
        if "experts" in state:
            self._experts.restore(state["experts"])


def experts_in_a_step(config: Config) -> int:
    """Return how many expert answers a train step has: so many that they are ``expert_data_ratio`` of a step with all
    of its rollouts.
    """
    share = config.buffer.trainer_input.expert_data_ratio
    rollouts = config.buffer.batch_size * config.algorithm.repeat_times * config.trainer.batches_per_step
    return math.ceil(rollouts * share / (1 - share))


def open_experts(config: Config, codec: TextCodec) -> RecordSource | None:
    """Return the source of the experts of a run, None where it has none.

    Raises:
        TasksetError: Their records cannot be read, or none of them can be used.
    """
    for data in config.buffer.trainer_input.auxiliary_buffers.values():
        records = read(data, codec, config.model.max_model_len)
        return RecordSource(data, records, seed=config.seed, size=experts_in_a_step(config), batches=ENDLESS)
    return None


ENDLESS = 1 << 62
"""Batches of experts: as many as the rollouts ask for."""


def _joined(rollouts: TrainBatch, experts: TrainBatch) -> ExperienceBatch:
    """Return both together; experts have ids of their own and are marked."""
    members: list[Experience] = []
    for one in experts.experiences.into_list():
        one.eid = EID(rollouts.batch, f"expert-{one.eid.task}", run=one.eid.run, suffix="expert")
        one.info = {**one.info, EXPERT: True}
        members.append(one)
    return ExperienceBatch.concat([rollouts.experiences, ExperienceBatch.of(members)])
