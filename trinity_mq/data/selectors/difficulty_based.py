"""The selector that prefers tasks near a target pass rate, with a Beta posterior for each task.

The numbers match Trinity-RFT 0.6 (``InterpolationBetaPREstimator``): see the test vector ``selector/difficulty_based``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trinity_mq.config.buffer.selectors import DifficultyBasedSelector
from trinity_mq.data.selectors.base import DrawPosition, TaskStats

Floats = NDArray[np.float64]

CAPABILITY_KEPT = 0.9
"""Factor by which each update multiplies the earlier sums from which the capability is computed."""
WRONG = 0.25
"""Mean absolute error of interpolated pass rates at and above which their weight is halved."""
LEAST_GAP = 1e-6
"""Added to the gap between the strong and the weak model for each task, so that the sum is not 0."""


class PassRates:
    """Posteriors of the pass rates of all tasks.

    Args:
        features: ``[tasks, 2]``, pass rates of a weak and of a strong model.
        m: Number of runs that an observed pass rate counts as.
        lamb: Fraction of the posterior that an update forgets.
        rho: Weight of the interpolated pass rates, as a fraction of ``m``.
        adaptive: Halve ``rho`` at the beginning of each update with wrong interpolated pass rates.
    """

    def __init__(self, features: Floats, m: float, lamb: float, rho: float, *, adaptive: bool = False) -> None:
        self._weak, self._strong = features.T
        self._m, self._lamb, self.rho, self._adapts = m, lamb, rho, adaptive
        self.alphas, self.betas = np.ones(len(features)), np.ones(len(features))
        self.capability = 0.0
        """Position of the policy between the weak model (0) and the strong model (1)."""
        self._gained = self._gap = 0.0

    def update(self, indexes: Sequence[int], pass_rates: Sequence[float]) -> None:
        """Learn the pass rates, from 0 to 1, of finished tasks. Several pass rates of a task count by their mean."""
        tasks, places = np.unique(np.asarray(indexes, dtype=np.int64), return_inverse=True)
        rates = np.bincount(places, weights=np.asarray(pass_rates, dtype=np.float64)) / np.bincount(places)
        weak, strong = self._weak[tasks], self._strong[tasks]
        self._gained = CAPABILITY_KEPT * self._gained + float(np.sum(rates - weak))
        self._gap = CAPABILITY_KEPT * self._gap + float(np.sum(strong - weak + LEAST_GAP))
        if self._gap > 0:
            self.capability = min(1.0, max(0.0, self._gained / self._gap))
        implied = np.clip(self._weak + self.capability * (self._strong - self._weak), 0.0, 1.0)
        if self._adapts and float(np.mean(np.abs(implied[tasks] - rates))) >= WRONG:
            self.rho /= 2
        runs = np.full(len(implied), self.rho * self._m)
        implied[tasks], runs[tasks] = rates, self._m
        self.alphas = (1 - self._lamb) * self.alphas + self._lamb + runs * implied
        self.betas = (1 - self._lamb) * self.betas + self._lamb + runs * (1 - implied)

    def predicted(self) -> Floats:
        """Return the mean of each task's posterior."""
        mean: Floats = self.alphas / (self.alphas + self.betas)
        return mean


def probabilities(rates: Floats, target: float, tau: float) -> Floats:
    """Return each task's probability of being chosen first: softmax of ``-|target - rate| / tau``."""
    scores = -np.abs(target - rates) / tau
    weights: Floats = np.exp(scores - scores.max())
    total: Floats = weights / weights.sum()
    return total


class DifficultyBased(DrawPosition):
    """Chooses tasks by the closeness of their estimated pass rate to the target, without replacement within a batch.

    Args:
        features: ``[tasks, 2]``, pass rates of a weak and of a strong model.
        config: The settings.
        seed: Seed of the draws.
    """

    def __init__(self, features: Floats, config: DifficultyBasedSelector, seed: int) -> None:
        super().__init__(seed)
        self._config = config
        self._observed = np.zeros(len(features), dtype=bool)
        self.rates = PassRates(features, config.m, config.lamb, config.rho, adaptive=config.adaptive_rho)

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks. If ``count`` exceeds the number of tasks, each task is chosen
        once before any is repeated.
        """
        indexes: list[int] = []
        while len(indexes) < count:
            part = self._ranked()[: count - len(indexes)].tolist()
            self.given += len(part)
            indexes += part
        return indexes

    def _ranked(self) -> NDArray[np.intp]:
        random = self.generator()
        rates = random.beta(self.rates.alphas, self.rates.betas) if self._config.do_sample else self.rates.predicted()
        if self._config.tau:
            # Gumbel noise on the log weights gives the ranking of draws without replacement (arXiv 1903.06059).
            scores = -np.abs(self._config.target_reward - rates) / self._config.tau + random.gumbel(size=len(rates))
        else:
            scores = -np.abs(self._config.target_reward - rates)
        return np.argsort(-scores, kind="stable")

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Learn mean rewards as pass rates, clipped to 0 to 1."""
        if stats:
            indexes = [task_stats.task for task_stats in stats]
            self._observed[indexes] = True
            self.rates.update(indexes, [min(1.0, max(0.0, task_stats.reward)) for task_stats in stats])

    def metrics(self) -> Mapping[str, float]:
        """Return capability, mean estimated pass rate and number of observed tasks."""
        return {
            "capability": self.rates.capability,
            "predicted": float(self.rates.predicted().mean()),
            "observed_tasks": float(self._observed.sum()),
        }
