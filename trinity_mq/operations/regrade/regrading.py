"""Regrading of batches: new rewards, the advantages that the run's algorithm computes from them, and the comparison."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity_mq.config import Config
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.operations.regrade.comparison import Comparison, RegradedExperience
from trinity_mq.operations.regrade.grading import Grader

if TYPE_CHECKING:
    from torch import Tensor

TEXT = 200
"""Maximum number of characters kept of each experience's response."""


class BatchRegrader:
    """Regrades batches one after another.

    Args:
        config: Configuration of the run, which determines the algorithm.
        grader: Calls the reward function.
        limit: Number of experiences after which no further batch is regraded. Batches are regraded whole, because
            advantages compare the experiences of a batch. None: no limit.
    """

    def __init__(self, config: Config, grader: Grader, limit: int | None) -> None:
        self._grader, self._remaining = grader, math.inf if limit is None else limit
        from trinity_mq.operators import AdvantageOperator

        self._algorithm = config.algorithm
        self._advantages = (
            AdvantageOperator(config.algorithm) if config.algorithm.advantage_agent == "operator" else None
        )
        self.comparison = Comparison()
        self.seen = 0
        """Number of experiences in all batches so far."""
        self.batches = 0
        self.problems: Counter[str] = Counter()
        """Number of batches without computed advantages, by reason."""

    @property
    def remarks(self) -> list[str]:
        """Return remarks for the reader of the figures."""
        if self._advantages is None:
            kind = self._algorithm.estimator.kind
            return [f"advantages are not shown: the estimator {kind} computes them in the trainer, from its own state"]
        return []

    async def take(self, batch: ExperienceBatch) -> bool:
        """Regrade the experiences of one batch and add them to the comparison. Return whether the limit is reached."""
        self._remaining -= len(batch)
        self.seen += len(batch)
        self.batches += 1
        new: list[float] = []
        regraded: list[Experience] = []
        for experience in await asyncio.to_thread(batch.to_list):
            if experience.reward is None:
                self._grader.failures["it had no reward before"] += 1
            elif (reward := await self._grader.grade(experience)) is not None:
                new.append(reward)
                regraded.append(experience)
        self.comparison.add(await asyncio.to_thread(self._compared, regraded, new))
        return self._remaining <= 0

    def _compared(self, regraded: Sequence[Experience], new: Sequence[float]) -> list[RegradedExperience]:
        advantages = self._new_advantages(regraded, new)
        return [
            RegradedExperience(
                uid=experience.eid.uid,
                group=experience.eid.tid,
                old=float(experience.reward or 0.0),
                new=reward,
                old_advantage=None
                if self._advantages is None
                else _mean_of(experience.advantages, experience.action_mask),
                new_advantage=advantages.get(experience.eid.uid),
                text=(experience.response_text or "")[:TEXT],
            )
            for experience, reward in zip(regraded, new, strict=True)
        ]

    def _new_advantages(self, regraded: Sequence[Experience], new: Sequence[float]) -> dict[str, float | None]:
        """Return the mean advantages under the new rewards by uid. Experiences that the algorithm filters out are
        missing.
        """
        if self._advantages is None or not regraded:
            return {}
        before = ExperienceBatch.of(regraded)
        empty_column: list[Any] = [None] * len(before)
        # token-level rewards come from the old function
        graded = before.replace(
            reward=list(new), advantages=empty_column, returns=empty_column, token_level_reward=empty_column
        )
        try:
            estimated, _ = self._advantages.apply(graded)
        except ValueError as error:
            self.problems[f"no advantages: {error}"] += 1
            return {}
        return {
            experience.eid.uid: _mean_of(experience.advantages, experience.action_mask)
            for experience in estimated.to_list()
        }


def _mean_of(advantages: Tensor | None, mask: Tensor | None) -> float | None:
    """Return the mean advantage over the trained tokens. ``advantages`` is float32 of shape ``[response]``."""
    if advantages is None:
        return None
    chosen = advantages if mask is None else advantages[mask.bool()]
    return float(chosen.float().mean()) if chosen.numel() else 0.0
