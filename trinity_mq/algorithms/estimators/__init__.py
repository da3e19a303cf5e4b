"""Advantage estimators: compute a number per trained token from the rewards of runs, or from a teacher's logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trinity_mq.algorithms.estimators.dots import dots_advantages
from trinity_mq.algorithms.estimators.gigpo import gigpo_advantages
from trinity_mq.algorithms.estimators.group import Baselines, group_advantages
from trinity_mq.algorithms.estimators.plugin import plugin_advantages
from trinity_mq.algorithms.estimators.teacher import distillation_advantages, jsd_advantages
from trinity_mq.algorithms.estimators.trajectories import discounted_advantages, gae_advantages
from trinity_mq.config.estimators import Estimator, EstimatorPlugin, NoEstimator
from trinity_mq.experience import ExperienceBatch

__all__ = ["ESTIMATORS", "estimate"]

Estimated = tuple[ExperienceBatch, dict[str, float]]
"""The remaining experiences of a batch, with ``advantages``, and metrics."""


@dataclass(frozen=True)
class EstimatorEntry:
    """The function of an estimator, which computes advantages from a batch and the estimator's section of the
    configuration, and the further arguments of this function.

    The section declares the inputs of the estimator and where it runs
    (:class:`trinity_mq.config.estimators.EstimatorBase`).
    """

    function: Callable[..., Estimated]
    takes: tuple[str, ...] = ()
    """Names of the arguments of :func:`estimate` that are passed to the function."""


def no_advantages(batch: ExperienceBatch, _: NoEstimator) -> Estimated:
    """Return the batch unchanged; the loss uses only likelihoods or preferences."""
    return batch, {}


ESTIMATORS: Mapping[str, EstimatorEntry] = MappingProxyType(
    {
        "group": EstimatorEntry(group_advantages, ("min_group_runs", "baselines")),
        "discounted": EstimatorEntry(discounted_advantages, ("token_penalty",)),
        "gigpo": EstimatorEntry(gigpo_advantages, ("min_group_runs",)),
        "cod": EstimatorEntry(dots_advantages, ("min_group_runs",)),
        "distill": EstimatorEntry(distillation_advantages),
        "jsd": EstimatorEntry(jsd_advantages),
        "gae": EstimatorEntry(gae_advantages, ("values", "token_penalty")),
        "none": EstimatorEntry(no_advantages),
    }
)
"""Estimators by the ``kind`` of their section."""
PLUGIN = EstimatorEntry(plugin_advantages, ("min_group_runs",))
"""Entry of custom estimators, which calls a function or class of the user."""


def estimate(
    batch: ExperienceBatch,
    args: Estimator,
    *,
    min_group_runs: int = 1,
    values: Tensor | None = None,
    token_penalty: Tensor | None = None,
    baselines: Baselines | None = None,
) -> Estimated:
    """Compute the advantages of a whole batch.

    Args:
        batch: Experiences in any order.
        args: Kind and settings of the estimator.
        min_group_runs: Minimum number of finished runs of a task, if the estimator compares runs and ``args`` does not
            set it.
        values: Critic values of the state before each token: ``[response tokens of the batch]``, in the order of the
            action masks.
        token_penalty: Subtracted from the rewards of tokens by ``discounted`` and ``gae``, such as a KL term:
            ``[response tokens of the batch]``.
        baselines: Moving average of each role's rewards, for the baseline ``role_mean``. Updated in place; the caller
            keeps the mapping, and saves it in its checkpoint.

    Returns:
        The remaining experiences, in the given order, with ``advantages`` as float32 ``[response]``, 0 for tokens that
        are not trained; and the metrics. With the estimator ``none`` the batch is unchanged.

    Raises:
        ValueError: An input of the estimator is missing or wrong in the batch or in the call, or the call has an input
            that the estimator does not use; the message names it.
        PluginError: A custom estimator cannot be used; see :func:`plugin_advantages`.
    """
    entry = PLUGIN if isinstance(args, EstimatorPlugin) else ESTIMATORS[args.kind]
    inputs: dict[str, Any] = {"values": values, "token_penalty": token_penalty, "baselines": baselines}
    for name, value in inputs.items():
        if value is not None and name not in entry.takes:
            raise ValueError(f"{name} is given to the estimator {args.kind!r}, which does not use it")
    if "values" in entry.takes and values is None:
        raise ValueError(
            f"the estimator {args.kind!r} got no values, wanted the values of a critic for each response token: it "
            "runs in the trainer"
        )
    inputs |= {"min_group_runs": min_group_runs}
    return entry.function(batch, args, **{name: inputs[name] for name in entry.takes})
