"""The last operator of a chain: the algorithm's advantage function."""

from __future__ import annotations

from typing import Any

from trinity_mq.algorithms.registry import ALGORITHMS
from trinity_mq.config import AlgorithmConfig
from trinity_mq.experience import ExperienceBatch, gather_custom_fields
from trinity_mq.operators.base import ColumnOperator


class AdvantageOperator(ColumnOperator):
    """Gives every experience its advantages, as the configured algorithm computes them. A batch whose custom fields
    could not be trained with fails here, and not the trainer.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.function = ALGORITHMS[config.algorithm_type].advantage

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the experiences that have advantages, and the function's metrics."""
        kept, metrics = self.function(batch, self.config)
        gather_custom_fields(kept)
        return kept, metrics
