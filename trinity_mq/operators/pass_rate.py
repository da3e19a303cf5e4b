"""Pass rates of tasks, the signal of a curriculum."""

from __future__ import annotations

import statistics
from typing import Any

from trinity_mq.algorithms.estimators.runs import is_finite, run_values
from trinity_mq.experience import ExperienceBatch
from trinity_mq.operators.base import ColumnOperator

KEY = "pass_rate"


class PassRateCalculator(ColumnOperator):
    """Sets ``info["pass_rate"]`` of every experience to the pass rate of its task: the mean reward over the task's
    runs.

    With rewards of 0 and 1 this is the share of right runs. A task without a finite reward has no pass rate. The
    distribution of the rates over the batch's tasks becomes metrics. Tasks are identified by ``eid.tid``, so a taskset
    without names or indexes also works.
    """

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return all experiences, and metrics under ``selection/``: the mean rate, and the shares of tasks whose rate
        is in a range.

        ``valid_ratio`` counts rates between 0 and 1, ``strict_valid_ratio`` rates between 1/16 and 15/16, bounds
        excluded; the other metrics are named after their bound.
        """
        groups, _ = run_values(batch, batch.values("reward"))
        rates = {tid: statistics.fmean(rewards.values()) for tid, rewards in groups.items() if rewards}
        infos = [
            {**(info or {}), KEY: rates[tid]} if tid in rates else info
            for info, tid in zip(batch.values("info"), batch.ids("tid"), strict=True)
        ]
        return batch.replace(info=infos), _ratios([rate for rate in rates.values() if is_finite(rate)])


def _ratios(rates: list[float]) -> dict[str, float]:
    if not rates:
        return {}
    low, high = 1 / 16, 15 / 16
    counts = {
        "valid_ratio": sum(0 < rate < 1 for rate in rates),
        "strict_valid_ratio": sum(low < rate < high for rate in rates),
        "<1_ratio": sum(rate < 1 for rate in rates),
        ">0_ratio": sum(rate > 0 for rate in rates),
        "<15_16_ratio": sum(rate < high for rate in rates),
        ">1_16_ratio": sum(rate > low for rate in rates),
    }
    return {
        "selection/pass_rate": statistics.fmean(rates),
        **{f"selection/{name}": count / len(rates) for name, count in counts.items()},
    }
