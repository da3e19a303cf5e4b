"""Metrics of the data of a train step, and of what a train step does with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.training.test_learner import Opener, batch, config
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.training.update import length_metrics


def answer(length: int, reward: float | None, **more: Any) -> Experience:
    return Experience(eid=EID(), tokens=[1] * (2 + length), prompt_length=2, reward=reward, **more)


def pair() -> Experience:
    return Experience(
        eid=EID(), experience_type="dpo", tokens=[1, 1], prompt_length=2, chosen=[1] * 3, rejected=[1] * 9
    )


def test_lengths_of_right_and_wrong_answers() -> None:
    found = length_metrics(
        ExperienceBatch.of(
            [
                answer(2, 1.0),
                answer(4, 0.5, metrics={"accuracy": 0.0}),
                answer(6, 0.0, truncate_status="response_truncated"),
                answer(8, None),
            ]
        )
    )
    assert found == {
        "prompt_length/mean": 2.0,
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/clipped_frac": 0.25,
        "response_length/right/mean": 2.0,
        "response_length/wrong/mean": 5.0,
    }


def test_pairs_count_in_the_mean_alone() -> None:
    assert length_metrics(ExperienceBatch.of([pair()])) == {"prompt_length/mean": 2.0, "response_length/mean": 6.0}
    mixed = length_metrics(ExperienceBatch.of([pair(), answer(3, 1.0)]))
    assert (mixed["response_length/mean"], mixed["response_length/max"]) == (5.0, 3.0)


async def test_how_old_the_tokens_are_and_how_often_experiences_are_used(opened: Opener) -> None:
    experiences = batch(1)
    for number, one in enumerate(experiences):
        one.versions = [(0, 1, 8 - number % 3)]
    ages = torch.cat([torch.full((one.response_length,), number % 3) for number, one in enumerate(experiences)]).float()
    metrics = await (await opened(config(epochs=2, mini_batches=3))).step(experiences, 9)
    assert metrics["sample/staleness/tokens/mean"] == pytest.approx(ages.mean().item())
    assert metrics["sample/staleness/tokens/max"] == 2.0
    assert metrics["sample/staleness/tokens/age_0"] == pytest.approx((ages == 0).float().mean().item())
    assert metrics["sample/staleness/tokens/age_1_2"] == pytest.approx((ages > 0).float().mean().item())
    assert metrics["sample/staleness/tokens/age_8"] == 0.0
    assert metrics["data/trained_tokens"] == len(ages)
    assert metrics["data/reuse_mean"] == 2.0
    assert metrics["perf/micro_batches"] == 1.0
    experiences[0].advantages = torch.full_like(experiences[0].advantages, math.nan)
    spoiled = await (await opened(config(mini_batches=3))).step(experiences, 9)
    assert spoiled["data/reuse_mean"] == pytest.approx(2 / 3), "of three mini-batches one was skipped"


async def test_what_is_imitated_and_what_it_weighs(opened: Opener) -> None:
    experiences = batch(1)
    for one in experiences[:3]:
        one.info["is_expert"] = True
    metrics = await (await opened(config(algorithm_type="mix"))).step(experiences, 1)
    assert (metrics["data/expert_frac"], metrics["data/mu"]) == (0.25, pytest.approx(0.1))
    assert "data/mu" not in await (await opened(config())).step(batch(1), 1)


async def test_a_step_tells_how_long_its_parts_took_and_how_far_it_moved_the_weights(opened: Opener) -> None:
    plain = config(algorithm_type="decoupled", lr=1e-2)
    settings = plain.model_copy(update={"trainer": plain.trainer.model_copy(update={"peak_tflops": 0.5})})
    learner = await opened(settings)
    before = torch.cat([one.clone().flatten() for _, one in await learner.weights()])
    metrics = await learner.step(batch(1), 1)
    after = torch.cat([one.flatten() for _, one in await learner.weights()])
    assert metrics["actor/update_norm"] == pytest.approx((after - before).norm().item(), rel=1e-4)
    assert metrics["actor/weight_norm"] == pytest.approx(after.norm().item(), rel=1e-4)
    assert metrics["actor/grad_norm_clipped"] == min(metrics["actor/grad_norm"], 1.0)
    parts = [metrics[f"time/{part}"] for part in ("score", "forward", "backward", "optimizer")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < metrics["time/train_step"]
    model = sum(one.numel() for one in learner.policy.parameters)
    flops = 6 * model * metrics["perf/tokens_per_second"]
    assert metrics["perf/tflops"] == pytest.approx(flops / 1e12)
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflops"] / 0.5)
    trained = metrics["perf/trained_tokens_per_second"] / metrics["perf/tokens_per_second"]
    experiences = batch(1)
    assert trained == pytest.approx(
        sum(one.response_length for one in experiences) / sum(len(one.tokens) for one in experiences)
    )
