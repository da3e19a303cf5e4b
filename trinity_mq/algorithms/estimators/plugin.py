"""Custom estimators: a function from the rewards of a task's runs to their advantages, or a class in Trinity-RFT's
form, which gets all experiences of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_mq.algorithms.estimators.runs import (
    finite_metrics,
    is_finite,
    mask_lengths,
    reward_metrics,
    run_values,
    with_scores,
)
from trinity_mq.algorithms.plugins import PluginError, check_signature
from trinity_mq.config.estimators import EstimatorPlugin
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.runtime.errors import custom_code
from trinity_mq.runtime.plugins import resolve
from trinity_mq.telemetry.group_drops import TOO_FEW_RUNS

PluginFunction = Callable[..., Sequence[float]]
"""Takes the rewards of a task's runs, ordered by run, and keyword arguments. Returns a number for each run."""

WANTED = "def {name}(rewards: list[float], *, your_argument: float = 1.0) -> list[float]"


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
        PluginError: The object is not a function, or does not accept these arguments.
    """
    function = resolve("estimator", args.kind)
    wanted = WANTED.format(name=args.kind.rpartition(".")[2])
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise PluginError(f"estimator {args.kind!r} is {function!r}, wanted a plain function: {wanted}")
    check_signature(args.kind, function, ("rewards",), args.args, wanted)
    return function  # type: ignore[no-any-return]


def plugin_advantages(
    batch: ExperienceBatch, args: EstimatorPlugin, min_group_runs: int = 1
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every run the number that the custom function returns for it, or let a class set the advantages, see
    :func:`class_advantages`.

    The function is called for each task with the finite rewards of its runs, as in the group estimator. Runs without a
    finite reward are dropped and counted, and so are tasks with fewer than ``min_group_runs`` remaining runs.

    Args:
        batch: A whole batch, in any order.
        args: The function or class and its arguments.
        min_group_runs: Default for ``args.min_group_runs`` if the function compares runs.

    Raises:
        ValueError: An experience has no action mask (dpo).
        PluginError: The function does not accept the arguments, raised an error, or did not return finite numbers.
    """
    if inspect.isclass(kind := resolve("estimator", args.kind)):
        return class_advantages(batch, kind, args)
    mask_lengths(batch)
    function = plugin_function(args)
    runs = dict(zip(batch.ids("rid"), batch.values("eid.run"), strict=True))
    groups, missing = run_values(batch, batch.values("reward"))
    min_runs = args.min_group_runs or (min_group_runs if args.compares_runs else 1)
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
    with custom_code(PluginError, f"estimator {args.kind!r}, for the rewards {rewards} of one task, raised"):
        result: Any = function(list(rewards), **args.args)
    try:
        values = [float(value) for value in result]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(rewards) or not all(map(is_finite, values)):
        raise PluginError(
            f"estimator {args.kind!r} returned {result!r} for the rewards {rewards}, wanted {len(rewards)} finite "
            "numbers, one for each run in this order"
        )
    return values


def advantage_object(kind: type, args: EstimatorPlugin) -> Any:
    """Return an object of the class ``kind``, made with ``args.args``; if these are empty, with its ``default_args``.

    Raises:
        PluginError: The object cannot be made, or is not callable.
    """
    with custom_code(PluginError, f"advantage_fn {args.kind} cannot be made with advantage_fn_args {args.args!r}:"):
        made = kind(**(args.args or kind.default_args()))  # type: ignore[attr-defined]
    if not callable(made) or inspect.isclass(made):
        raise PluginError(
            f"advantage_fn {args.kind} makes {made!r}, wanted a subclass of trinity_mq.algorithms.AdvantageFn"
        )
    return made


def class_advantages(
    batch: ExperienceBatch, kind: type, args: EstimatorPlugin
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give experiences the advantages that an object of ``kind`` gives them; experiences that it leaves out are
    dropped.

    If any run has a finite reward, runs without a finite reward are dropped first and counted. Tasks may have any
    number of runs: ``min_group_runs`` has no effect. Each batch has an object of its own, so that a batch has the same
    advantages on every machine.

    Raises:
        ValueError: An experience has no action mask (dpo).
        PluginError: The class raised an error, or did not return advantages for each experience that stays, and
            metrics by name.
    """
    mask_lengths(batch)
    groups, missing = run_values(batch, batch.values("reward"))
    rewarded = {rid for group in groups.values() for rid in group}
    if rewarded:
        batch = batch.select([number for number, rid in enumerate(batch.ids("rid")) if rid in rewarded])
    made = advantage_object(kind, args)
    experiences = batch.to_list()
    in_trainer = getattr(kind, "compute_in_trainer", lambda: False)()
    with custom_code(PluginError, f"advantage_fn {args.kind} raised"):
        result, metrics = made(_proto(experiences) if in_trainer else experiences)
    with custom_code(
        PluginError,
        f"advantage_fn {args.kind} sets advantages or returns that cannot be used, wanted Tensors "
        f"[{len(experiences)}, longest response]:",
    ):
        staying = _rows_of(result, experiences) if in_trainer else result
    numbers = {"rollout/missing_rewards": float(missing) if rewarded else 0.0}
    with custom_code(
        PluginError, f"advantage_fn {args.kind} returns the metrics {metrics!r:.120}, wanted numbers by name:"
    ):
        own_metrics = finite_metrics(dict(metrics or {}))
    for name, number in own_metrics.items():
        numbers[name if "/" in name else f"group_advantages/{name}"] = number
    return _checked(staying, args), numbers


class _Columns(dict[str, Tensor]):
    """The tensors of a ``DataProto``."""

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Number of sequences, as a shape."""
        return next(iter(self.values())).shape[:1]


def _proto(experiences: Sequence[Experience]) -> Any:
    """Return experiences in the form of veRL's ``DataProto``. Tensors are padded on the right, ``[sequences, longest
    response]``. Without ``token_level_reward`` the last token has the reward of the experience.
    """
    masks, rewards = [_mask(experience) for experience in experiences], []
    for experience, mask in zip(experiences, masks, strict=True):
        row = experience.token_level_reward
        if row is None:
            row = torch.zeros(len(mask))
            row[-1:] = float(experience.reward or 0.0)
        rewards.append(row.float())
    columns = _Columns(
        response_mask=_padded([mask.bool() for mask in masks]),
        token_level_scores=_padded(rewards),
        token_level_rewards=_padded(rewards),
    )
    for names, field in (
        (("old_log_probs", "rollout_log_probs"), "logprobs"),
        (("teacher_logprobs", "teacher_log_probs"), "teacher_logprobs"),
    ):
        values = [getattr(experience, field) for experience in experiences]
        if all(value is not None for value in values):
            columns |= dict.fromkeys(names, _padded(values))
    plain = {
        "uid": np.array([experience.eid.tid for experience in experiences]),
        "unique_ids": np.array([experience.eid.uid for experience in experiences]),
    }
    return SimpleNamespace(batch=columns, non_tensor_batch=plain, meta_info={})


def _mask(experience: Experience) -> Tensor:
    assert experience.action_mask is not None
    return experience.action_mask


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def _rows_of(proto: Any, experiences: Sequence[Experience]) -> list[Experience]:
    """Set ``advantages`` and ``returns`` of the experiences from the rows of ``proto``, and return the experiences."""
    columns: Mapping[str, Any] = getattr(proto, "batch", {})
    for number, experience in enumerate(experiences):
        for name in ("advantages", "returns"):
            if isinstance(values := columns.get(name), Tensor) and len(values) == len(experiences):
                setattr(experience, name, values[number, : len(_mask(experience))])
    return list(experiences)


def _checked(staying: Any, args: EstimatorPlugin) -> ExperienceBatch:
    if not isinstance(staying, Sequence) or not all(isinstance(item, Experience) for item in staying):
        raise PluginError(
            f"advantage_fn {args.kind} returns {staying!r:.200}, wanted a pair: a list of experiences, and metrics"
        )
    uids = [experience.eid.uid for experience in staying]
    if len(set(uids)) < len(uids):
        raise PluginError(
            f"advantage_fn {args.kind} returns {len(uids) - len(set(uids))} experiences twice, wanted each at most "
            "once: an experience counts once in a train step"
        )
    for experience in staying:
        advantages, mask = experience.advantages, experience.action_mask
        if not isinstance(advantages, Tensor) or mask is None or advantages.shape != mask.shape:
            raise PluginError(
                f"advantage_fn {args.kind} leaves {experience.eid.uid} with the advantages {advantages!r:.120}, wanted "
                f"a Tensor with a number for each of its {0 if mask is None else len(mask)} response tokens"
            )
        if not advantages.isfinite().all():
            raise PluginError(
                f"advantage_fn {args.kind} gives {experience.eid.uid} the advantages {advantages!r:.120}, wanted "
                "finite numbers"
            )
        experience.advantages = torch.where(mask.bool(), advantages.float(), 0.0)
        if isinstance(experience.returns, Tensor):
            experience.returns = experience.returns.float()
    return ExperienceBatch.of(list(staying))
