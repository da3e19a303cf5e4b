"""The last operator of a chain: the algorithm's estimator."""

from __future__ import annotations

from typing import Any

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.estimators.group import roles
from trinity_mq.algorithms.estimators.plugin import check_plugin
from trinity_mq.config import AlgorithmConfig
from trinity_mq.config.estimators import EstimatorPlugin, GroupEstimator
from trinity_mq.experience import ExperienceBatch, gather_custom_fields
from trinity_mq.operators.base import ColumnOperator


class AdvantageOperator(ColumnOperator):
    """Sets the advantages of every experience with the configured estimator, unless the estimator runs in the trainer.
    A batch whose custom fields or roles cannot be trained on fails here and not in the trainer.

    Raises:
        FatalError: The estimator is a user's function that cannot be called as configured; raised by the constructor.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        if isinstance(config.estimator, EstimatorPlugin):
            check_plugin(config.estimator)  # fails before the first batch
        self.config = config

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the remaining experiences, with advantages unless the trainer computes them, and the estimator's
        metrics.
        """
        metrics: dict[str, Any] = {}
        if self.config.advantage_agent == "operator":
            least = self.config.effective_min_group_runs
            batch, metrics = estimate(batch, self.config.estimator, min_group_runs=least)
        elif isinstance(self.config.estimator, GroupEstimator):
            roles(batch)
        gather_custom_fields(batch)
        return batch, metrics
