"""Advantages in class form: the bridge from Trinity-RFT's classes, which get all experiences of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.estimators.runs import is_finite, mask_lengths, run_values
from trinity_mq.config.estimators import EstimatorPlugin
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.runtime.errors import FatalError, describe_error


class AdvantageClassError(FatalError, ValueError):
    """A class of advantages cannot be made, or did not return experiences with advantages."""


def advantage_object(kind: type, args: EstimatorPlugin) -> Any:
    """Return an object of a class; without ``args`` it is made with its ``default_args``.

    Raises:
        AdvantageClassError: It cannot be made, or is not callable.
    """
    try:
        made = kind(**(args.args or kind.default_args()))  # type: ignore[attr-defined]
    except Exception as error:  # custom code may raise any error
        raise AdvantageClassError(
            f"advantage_fn {args.kind} cannot be made with advantage_fn_args {args.args!r}: {describe_error(error)}"
        ) from error
    if not callable(made) or inspect.isclass(made):
        raise AdvantageClassError(
            f"advantage_fn {args.kind} makes {made!r}, wanted a subclass of trinity_mq.algorithms.AdvantageFn"
        )
    return made


def class_advantages(
    batch: ExperienceBatch, kind: type, args: EstimatorPlugin
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give experiences the advantages that an object of ``kind`` gives them; experiences that it leaves out are
    dropped.

    If any run has a finite reward, runs without a finite reward are dropped first and counted. Each batch has an object
    of its own, so that a batch has the same advantages on every machine.

    Raises:
        ValueError: An experience has no action mask (dpo).
        AdvantageClassError: The class raised an error, or did not return advantages for each experience that stays.
    """
    mask_lengths(batch)
    groups, missing = run_values(batch, batch.values("reward"))
    rewarded = {rid for group in groups.values() for rid in group}
    if rewarded:
        batch = batch.select([number for number, rid in enumerate(batch.ids("rid")) if rid in rewarded])
    made = advantage_object(kind, args)
    experiences = batch.to_list()
    in_trainer = getattr(kind, "compute_in_trainer", lambda: False)()
    try:
        if in_trainer:
            result, metrics = made(_proto(experiences))
        else:
            result, metrics = made(experiences)
    except Exception as error:  # custom code may raise any error
        raise AdvantageClassError(f"advantage_fn {args.kind} raised {describe_error(error)}") from error
    staying = _rows_of(result, experiences) if in_trainer else result
    numbers = {"rollout/missing_rewards": float(missing) if rewarded else 0.0}
    for name, value in dict(metrics or {}).items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if is_finite(number):
            numbers[str(name) if "/" in str(name) else f"group_advantages/{name}"] = float(number)
    return _checked(staying, args), numbers


class _Columns(dict[str, Tensor]):
    """The tensors of a ``DataProto``."""

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Number of sequences, as a shape."""
        return next(iter(self.values())).shape[:1]


def _proto(experiences: Sequence[Experience]) -> Any:
    """Return experiences in the form of veRL's ``DataProto``. Tensors are padded on the right, ``[sequences, longest
    response]``. The reward of an experience is the reward of its last token.
    """
    masks = [experience.action_mask for experience in experiences]
    assert all(mask is not None for mask in masks)
    rewards = []
    for experience, mask in zip(experiences, masks, strict=True):
        if (by_token := getattr(experience, "token_level_reward", None)) is not None:
            rewards.append(by_token.float())
            continue
        row = torch.zeros(0 if mask is None else len(mask))
        if len(row):
            row[-1] = float(experience.reward or 0.0)
        rewards.append(row)
    columns = _Columns(
        response_mask=_padded([mask.bool() for mask in masks if mask is not None]),
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


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _rows_of(proto: Any, experiences: Sequence[Experience]) -> list[Experience]:
    """Return the experiences with the rows of advantages and returns."""
    columns: Mapping[str, Any] = getattr(proto, "batch", {})
    for number, experience in enumerate(experiences):
        length = len(experience.action_mask if experience.action_mask is not None else ())
        for name in ("advantages", "returns"):
            if isinstance(values := columns.get(name), Tensor) and len(values) == len(experiences):
                setattr(experience, name, values[number, :length])
    return list(experiences)


def _checked(staying: Any, args: EstimatorPlugin) -> ExperienceBatch:
    if not isinstance(staying, Sequence) or not all(isinstance(item, Experience) for item in staying):
        raise AdvantageClassError(
            f"advantage_fn {args.kind} returns {staying!r:.200}, wanted a pair: a list of experiences, and metrics"
        )
    uids = [experience.eid.uid for experience in staying]
    if len(set(uids)) < len(uids):
        raise AdvantageClassError(
            f"advantage_fn {args.kind} returns {len(uids) - len(set(uids))} experiences twice, wanted each at most "
            "once: an experience counts once in a train step"
        )
    for experience in staying:
        advantages, mask = experience.advantages, experience.action_mask
        if not isinstance(advantages, Tensor) or mask is None or advantages.shape != mask.shape:
            raise AdvantageClassError(
                f"advantage_fn {args.kind} leaves {experience.eid.uid} with the advantages {advantages!r:.120}, wanted "
                f"a Tensor with a number for each of its {0 if mask is None else len(mask)} response tokens"
            )
        if not advantages.isfinite().all():
            raise AdvantageClassError(
                f"advantage_fn {args.kind} gives {experience.eid.uid} the advantages {advantages!r:.120}, wanted "
                "finite numbers"
            )
        experience.advantages = torch.where(mask.bool(), advantages.float(), 0.0)
        if isinstance(experience.returns, Tensor):
            experience.returns = experience.returns.float()
    return ExperienceBatch.of(list(staying))
