"""AdamW, and the schedule as pure functions of the train step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trinity_mq.config.algorithm import AlgorithmConfig, OptimizerConfig


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
