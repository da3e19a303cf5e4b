"""Estimators by the kind of their configuration, and the one function that runs any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trinity_mq.algorithms.estimators.gigpo import gigpo_advantages
from trinity_mq.algorithms.estimators.group import Baselines, group_advantages
from trinity_mq.algorithms.estimators.plugin import plugin_advantages
from trinity_mq.algorithms.estimators.teacher import distillation_advantages, jsd_advantages
from trinity_mq.algorithms.estimators.trajectories import discounted_advantages, gae_advantages
from trinity_mq.config.estimators import Estimator, EstimatorPlugin, NoEstimator
from trinity_mq.experience import ExperienceBatch

Estimated = tuple[ExperienceBatch, dict[str, float]]
"""The experiences that stay of a batch, with ``advantages``, and metrics."""


@dataclass(frozen=True)
class Entry:
    """An estimator: from a batch and its section of the configuration to advantages.

    What it needs and where it runs, the section says (:class:`trinity_mq.config.estimators.EstimatorBase`).
    """

    function: Callable[..., Estimated]
    takes: tuple[str, ...] = ()
    """Arguments of :func:`estimate` that the function takes too, by name."""


def no_advantages(batch: ExperienceBatch, _: NoEstimator) -> Estimated:
    """Return the batch as it is: the loss looks at likelihoods or preferences alone."""
    return batch, {}


ESTIMATORS: Mapping[str, Entry] = MappingProxyType(
    {
        "group": Entry(group_advantages, ("min_group_runs", "baselines")),
        "discounted": Entry(discounted_advantages, ("token_penalty",)),
        "gigpo": Entry(gigpo_advantages, ("min_group_runs",)),
        "distill": Entry(distillation_advantages),
        "jsd": Entry(jsd_advantages),
        "gae": Entry(gae_advantages, ("values", "token_penalty")),
        "none": Entry(no_advantages),
    }
)
"""Estimators by the ``kind`` of their section."""
PLUGIN = Entry(plugin_advantages, ("min_group_runs",))
"""The entry that calls a function of the user's own."""


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
        batch: In any order.
        args: Which estimator, and its settings.
        min_group_runs: Least finished runs of a task where runs are compared and ``args`` does not say.
        values: The critic's, of the state before each token: ``[response tokens of the batch]``, in the order of the
            action masks.
        token_penalty: Taken from the rewards of tokens by ``discounted`` and ``gae``, such as a KL term:
            ``[response tokens of the batch]``.
        baselines: The moving averages of ``role_mean``, updated in place: the caller keeps them, in its checkpoint too.

    Returns:
        The experiences that stay, in the order given, with ``advantages`` as float32 ``[response]``, 0 where no token
        is trained; and the metrics.

    Raises:
        ValueError: The batch, or the caller, has not what the estimator needs; the message says what, and whose it is.
    """
    entry = PLUGIN if isinstance(args, EstimatorPlugin) else ESTIMATORS[args.kind]
    given: dict[str, Any] = {"values": values, "token_penalty": token_penalty, "baselines": baselines}
    for name, value in given.items():
        if value is not None and name not in entry.takes:
            raise ValueError(f"{name} is given to the estimator {args.kind!r}, which would not look at it")
    if "values" in entry.takes and values is None:
        raise ValueError(
            f"the estimator {args.kind!r} was given no values, wanted those of a critic for each response token: it "
            "runs in the trainer"
        )
    given |= {"min_group_runs": min_group_runs}
    return entry.function(batch, args, **{name: given[name] for name in entry.takes})
