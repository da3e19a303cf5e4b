"""Custom estimators: a function from the rewards of a task's runs to their advantages, or a class in Trinity-RFT's
form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trinity_mq.algorithms.estimators.class_form import advantage_object, class_advantages
from trinity_mq.algorithms.estimators.runs import is_finite, mask_lengths, reward_metrics, run_values, with_scores
from trinity_mq.config.estimators import EstimatorPlugin
from trinity_mq.experience import ExperienceBatch
from trinity_mq.runtime.errors import FatalError, describe_error
from trinity_mq.runtime.plugins import resolve
from trinity_mq.telemetry.group_drops import TOO_FEW_RUNS

PluginFunction = Callable[..., Sequence[float]]
"""Takes the rewards of a task's runs, ordered by run, and keyword arguments. Returns a number for each run."""

WANTED = "def {name}(rewards: list[float], *, your_argument: float = 1.0) -> list[float]"


class EstimatorError(FatalError, ValueError):
    """A custom estimator cannot be called as required, or did not return advantages."""


def check_plugin(args: EstimatorPlugin) -> None:
    """Import and check a custom estimator.

    Raises:
        FatalError: It cannot be imported, or cannot be made or called with these arguments.
    """
    if inspect.isclass(kind := resolve("estimator", args.kind)):
        advantage_object(kind, args)
    else:
        plugin_function(args)


def plugin_function(args: EstimatorPlugin) -> PluginFunction:
    """Return the function with the name in ``args``.

    Raises:
        UnknownNameError: The function cannot be imported.
        EstimatorError: The object is not a function, or does not accept these arguments.
    """
    function = resolve("estimator", args.kind)
    signature = WANTED.format(name=args.kind.rpartition(".")[2])
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise EstimatorError(f"estimator {args.kind!r} is {function!r}, wanted a plain function: {signature}")
    try:
        inspect.signature(function).bind([0.0], **args.args)
    except (TypeError, ValueError) as error:
        raise EstimatorError(
            f"estimator {args.kind!r} cannot be called with rewards and args {args.args!r}: {error}; it is "
            f"{function.__name__}{inspect.signature(function)}, wanted {signature}"
        ) from error
    return function  # type: ignore[no-any-return]


def plugin_advantages(
    batch: ExperienceBatch, args: EstimatorPlugin, min_group_runs: int = 1
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every run the number that the custom function returns for it, or let a class set the advantages, see
    :func:`class_advantages`.

    The function is called for each task with the finite rewards of its runs, as in the group estimator. Runs without a
    finite reward are dropped and counted, and so are tasks with fewer than ``min_group_runs`` remaining runs.

    Raises:
        ValueError: An experience has no action mask (dpo).
        EstimatorError: The function does not accept the arguments, raised an error, or did not return finite numbers.
    """
    if inspect.isclass(kind := resolve("estimator", args.kind)):
        return class_advantages(batch, kind, args)
    mask_lengths(batch)
    function = plugin_function(args)
    runs = dict(zip(batch.ids("rid"), batch.values("eid.run"), strict=True))
    groups, missing = run_values(batch, batch.values("reward"))
    min_runs = args.min_group_runs or min_group_runs
    rids_by_task = {
        tid: sorted(group, key=runs.__getitem__) for tid, group in groups.items() if len(group) >= max(min_runs, 1)
    }
    rewards = {tid: [groups[tid][rid] for rid in rids] for tid, rids in rids_by_task.items()}
    scores: dict[str, float] = {}
    unvaried = 0
    for tid, rids in rids_by_task.items():
        values = _call(function, args, rewards[tid])
        unvaried += not any(values)
        scores |= zip(rids, values, strict=True)
    staying = [number for number, rid in enumerate(batch.ids("rid")) if rid in scores]
    advantages = [scores[batch.ids("rid")[number]] for number in staying]
    return with_scores(batch.select(staying), advantages), {
        "rollout/missing_rewards": float(missing),
        TOO_FEW_RUNS.metric: float(len(groups) - len(rids_by_task)),
        "rollout/zero_variance_groups": float(unvaried),
        **reward_metrics(list(rewards.values())),
    }


def _call(function: PluginFunction, args: EstimatorPlugin, rewards: list[float]) -> list[float]:
    try:
        result: Any = function(list(rewards), **args.args)
    except Exception as error:  # custom code may raise any error
        raise EstimatorError(
            f"estimator {args.kind!r} raised {describe_error(error)}, for the rewards {rewards} of one task"
        ) from error
    try:
        values = [float(value) for value in result]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(rewards) or not all(map(is_finite, values)):
        raise EstimatorError(
            f"estimator {args.kind!r} returned {result!r} for the rewards {rewards}, wanted {len(rewards)} finite "
            "numbers, one for each run in this order"
        )
    return values
