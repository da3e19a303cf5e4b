"""One optimizer step over micro-batches, and the metrics of the optimizer steps that make a train step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from trinity_mq.algorithms.registry import LossFunction
from trinity_mq.config.algorithm import AlgorithmConfig, OptimizerConfig
from trinity_mq.training.packing import MicroBatch
from trinity_mq.training.policy import LearnerError, Policy


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW (arXiv 1711.05101); the learning rate is set before each step."""
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def decay_factor(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Return ``max(min_lr_ratio, 1 - step / total_steps)``, or 1 for a constant rate or without a known end.

    Args:
        config: The schedule.
        step: Train step, from 1.
        total_steps: Train steps of the run.
    """
    if config.lr_scheduler_type == "constant" or total_steps is None:
        return 1.0
    return max(config.min_lr_ratio, 1 - step / total_steps)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Return the rate of train step ``step`` (from 1): ``lr`` x decay x warm-up ``min(1, step / lr_warmup_steps)``."""
    warm_up = min(1.0, step / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
    return config.lr * decay_factor(config, step, total_steps) * warm_up


def entropy_coefficient(config: AlgorithmConfig, step: int, total_steps: int | None) -> float:
    """Return the weight of the entropy in train step ``step``; with ``entropy_decay`` it decays as the rate does."""
    factor = decay_factor(config.optimizer, step, total_steps) if config.entropy_decay else 1.0
    return config.entropy_coef * factor


DIFFERENCE = "rollout/rollout_vs_train_logprob_diff"


def optimizer_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    config: AlgorithmConfig,
    entropy_weight: float,
) -> tuple[bool, dict[str, float]]:
    """Accumulate the gradient of all ``batches``, clip it and move the weights once.

    The loss is ``(policy loss - entropy_weight x entropy) / tokens``, summed over and divided by the trained tokens of
    all batches together: how they are cut into micro-batches does not change the gradient.

    Returns:
        Whether loss and gradient were finite (else weights and optimizer are untouched), and metrics.

    Raises:
        LearnerError: The loss function takes a custom field that the experiences do not have.
    """
    tokens = sum(batch.tokens for batch in batches)
    optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for packed in batches:
        batch = packed.to(policy.device)
        logprobs, entropy = policy.score(batch, entropy_gradient=entropy_weight > 0)
        custom = custom_arguments(loss_function, batch.custom)
        terms = loss_function(logprobs, batch.old_logprobs, batch.advantages, config, **custom)
        loss = terms.loss - entropy_weight * entropy.sum() if entropy_weight > 0 else terms.loss
        torch.autograd.backward(loss / tokens)
        difference = (logprobs.detach() - batch.old_logprobs).abs()
        found = {"pg_loss": terms.loss.detach(), "entropy": entropy.detach().sum(), "difference": difference.sum()}
        for name, value in (found | terms.sums).items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in {"difference": difference.max(), **terms.maxima}.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    norm = clip_grad_norm_(policy.parameters, config.optimizer.clip_grad).item()
    mean = {name: value.item() / tokens for name, value in sums.items()}
    finite = all(map(math.isfinite, (norm, mean["pg_loss"], mean["entropy"])))
    if finite:
        optimizer.step()
    metrics = {f"{DIFFERENCE}/mean": mean.pop("difference"), f"{DIFFERENCE}/max": maxima.pop("difference").item()}
    metrics |= {f"actor/{name}": value for name, value in mean.items()}
    metrics |= {f"actor/{name}": value.item() for name, value in maxima.items()}
    entropy_loss = -entropy_weight * mean["entropy"]
    return finite, metrics | {
        "actor/entropy_loss": entropy_loss,
        "actor/loss": mean["pg_loss"] + entropy_loss,
        "actor/grad_norm": norm,
    }


def custom_arguments(loss_function: LossFunction, custom: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the custom fields that ``loss_function`` has a parameter for.

    Raises:
        LearnerError: One that it needs is not there.
    """
    wanted = list(inspect.signature(loss_function).parameters.values())[4:]
    for one in wanted:
        if one.name not in custom and one.default is one.empty:
            raise LearnerError(
                f"the loss function takes the custom field {one.name!r}, and the experiences have "
                f"{', '.join(map(repr, custom)) or 'none'}; give each a CustomField with this destination_field"
            )
    return {one.name: custom[one.name] for one in wanted if one.name in custom}


class StepTotals:
    """Collects what the optimizer steps of one train step report."""

    def __init__(self) -> None:
        self._applied: list[dict[str, float]] = []
        self._first: dict[str, float] | None = None
        self._nonfinite = 0
        self._empty = 0

    def add(self, finite: bool, metrics: dict[str, float]) -> None:
        """Count one optimizer step."""
        if self._first is None:
            # Only the first one sees the weights that the batch was meant for.
            self._first = {name: value for name, value in metrics.items() if name.startswith(DIFFERENCE)}
        if finite:
            self._applied.append(metrics)
        else:
            self._nonfinite += 1

    def add_empty(self) -> None:
        """Count a mini-batch without a trained token."""
        self._empty += 1

    def metrics(self) -> dict[str, float]:
        """Return averages (of ``*_max`` the largest) over the applied optimizer steps, and counts; all finite."""
        result = {
            "actor/optimizer_steps": float(len(self._applied)),
            "actor/nonfinite_skipped": float(self._nonfinite),
            "actor/empty_skipped": float(self._empty),
        }
        for name in self._applied[0] if self._applied else ():
            values = [metrics[name] for metrics in self._applied]
            result[name] = max(values) if name.endswith("_max") else math.fsum(values) / len(values)
        result |= self._first or {}
        return {name: value for name, value in result.items() if math.isfinite(value)}
