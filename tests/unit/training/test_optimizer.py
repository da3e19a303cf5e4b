"""The schedule, as the measured recipe computes it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.algorithms.vectors import VECTORS
from trinity_mq.config import AlgorithmConfig, OptimizerConfig
from trinity_mq.training.update import (
    decay_factor,
    entropy_coefficient,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)


def test_the_rate_is_that_of_the_recipe() -> None:
    config = OptimizerConfig(lr=1e-3, lr_warmup_steps=10, min_lr_ratio=0.1)
    for step in range(1, 301):
        assert learning_rate(config, step, 300) == pytest.approx(1e-3 * max(0.1, 1 - step / 300) * min(1, step / 10))
    assert learning_rate(config, 1, 300) == pytest.approx(1e-3 * (299 / 300) / 10)
    assert learning_rate(config, 300, 300) == learning_rate(config, 900, 300) == pytest.approx(1e-4)


@pytest.mark.parametrize("scheduler", ["constant", "cosine"])
def test_the_schedules_of_the_vector(scheduler: str) -> None:
    """Its ``linear`` begins after the warm-up; ours begins with the first step, as it was measured."""
    vector = VECTORS["lr_schedule"]
    given = vector["args"]
    config = OptimizerConfig(
        lr=1.0, lr_warmup_steps=given["warmup"], min_lr_ratio=given["min_lr_ratio"], lr_scheduler_type=scheduler
    )
    found = [learning_rate(config, step, given["total"]) for step in vector["inputs"]["steps"]]
    assert found == pytest.approx(vector["expected"][scheduler], abs=1e-12)


def test_a_cosine_falls_without_a_step_upwards_and_stays_at_its_end() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=3, min_lr_ratio=0.2, lr_scheduler_type="cosine")
    rates = [learning_rate(config, step, 20) for step in range(3, 30)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == learning_rate(config, 20, 20) == pytest.approx(0.2)
    whole_run_is_warm_up = [learning_rate(config, step, 3) for step in (1, 3, 4)]
    assert whole_run_is_warm_up == pytest.approx([1 / 3, 1.0, 0.2])


@pytest.mark.parametrize(("scheduler", "total"), [("constant", 300), ("linear", None), ("cosine", None)])
def test_a_constant_rate_or_an_unknown_end_does_not_decay(scheduler: str, total: int | None) -> None:
    config = OptimizerConfig(lr=1e-3, lr_warmup_steps=4, lr_scheduler_type=scheduler)
    assert decay_factor(config, 250, total) == 1
    assert [learning_rate(config, step, total) for step in (1, 4, 250)] == [2.5e-4, 1e-3, 1e-3]


def test_without_warm_up_the_first_rate_is_whole() -> None:
    assert learning_rate(OptimizerConfig(lr=1e-3, lr_warmup_steps=0), 1, None) == 1e-3


def test_the_entropy_weight_follows_the_decay_but_not_the_warm_up() -> None:
    falling = AlgorithmConfig(entropy_coef=0.02, entropy_decay=True)
    assert entropy_coefficient(falling, 1, 100) == pytest.approx(0.02 * 0.99)
    assert entropy_coefficient(falling, 95, 100) == pytest.approx(0.02 * 0.1)
    assert entropy_coefficient(AlgorithmConfig(entropy_coef=0.02), 95, 100) == 0.02


def test_the_optimizer_takes_its_settings_and_the_rate_it_is_given() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([weight], OptimizerConfig(lr=1.0, betas=(0.5, 0.75), weight_decay=0.0))
    assert optimizer.defaults["betas"] == (0.5, 0.75)
    set_learning_rate(optimizer, 0.125)
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.125)
