"""Advantages that the trainer computes from what it keeps over train steps, and that a restart does not change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_learner import Opener, batch, config, folder, opened, same, weights_of
from trinity_mq.experience import Experience
from trinity_mq.training.checkpoint import DamagedCheckpointError
from trinity_mq.training.learner import TorchLearner

__all__ = ["folder", "opened"]

ROLES = ("black", "white")


def played(seed: int) -> list[Experience]:
    """Rewarded answers of two players."""
    experiences = batch(seed)
    for number, one in enumerate(experiences):
        one.advantages, one.reward = None, 0.25 * number - seed
        one.info = {"role": ROLES[number % 2]}
    return experiences


def moved_baselines(seeds: list[int]) -> dict[str, float]:
    """Return the averages after the answers of some train steps, one reward after the other (decay .95)."""
    result: dict[str, float] = {}
    for seed in seeds:
        for one in played(seed):
            role = one.info["role"]
            result[role] = 0.95 * result.get(role, 0.0) + 0.05 * float(one.reward or 0.0)
    return result


def baselines(learner: TorchLearner) -> dict[str, float]:
    return dict(learner._memory.baselines)


async def test_the_baseline_of_a_role_moves_on_from_step_to_step(opened: Opener) -> None:
    learner = await opened(config(algorithm_type="rae"))
    for step in (1, 2):
        metrics = await learner.step(played(step), step)
        assert metrics["actor/optimizer_steps"] == 1
        assert "group_advantages/reward_mean/mean" in metrics
        assert baselines(learner) == pytest.approx(moved_baselines(list(range(1, step + 1))), abs=1e-12)


async def test_the_step_is_that_of_advantages_computed_by_hand(opened: Opener) -> None:
    learner, by_hand = await opened(config(algorithm_type="rae")), await opened(config(**CLIPPED))
    for step in (1, 2):
        before, experiences = moved_baselines(list(range(1, step))), played(step)
        for one in experiences:
            role, reward = one.info["role"], float(one.reward or 0.0)
            one.advantages = torch.full_like(one.logprobs, reward - before.get(role, 0.0))
            before[role] = 0.95 * before.get(role, 0.0) + 0.05 * reward
        await learner.step(played(step), step)
        await by_hand.step(experiences, step)
    assert same(await weights_of(learner), await weights_of(by_hand))


CLIPPED: dict[str, Any] = {"surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}}


async def test_baselines_go_on_from_a_checkpoint(tmp_path: Path, opened: Opener) -> None:
    settings = config(algorithm_type="rae", mini_batches=2)
    learner = await opened(settings)
    for step in (1, 2):
        await learner.step(played(step), step)
    await learner.save(tmp_path)
    resumed = await opened(settings, checkpoint=tmp_path)
    assert baselines(resumed) == baselines(learner) != {}
    for step in (3, 4):
        for one in (learner, resumed):
            await one.step(played(step), step)
    assert baselines(resumed) == baselines(learner)
    assert same(await weights_of(learner), await weights_of(resumed))


async def test_a_step_that_changes_nothing_leaves_the_baselines(opened: Opener) -> None:
    learner = await opened(config(algorithm_type="rae"))
    await learner.step(played(1), 1)
    before = baselines(learner)
    bad, without = played(2), played(2)
    for one in bad:
        one.logprobs = torch.full_like(one.logprobs, math.nan)
    metrics = await learner.step(bad, 2)
    assert metrics["actor/optimizer_steps"] == 0
    assert baselines(learner) == before
    without[-1].info = {}
    with pytest.raises(ValueError, match=r"has info\['role'\] None, wanted the name of who acted"):
        await learner.step(without, 2)
    assert baselines(learner) == before
    await learner.step(played(2), 2)
    assert baselines(learner) == pytest.approx(moved_baselines([1, 2]), abs=1e-12)


async def test_a_checkpoint_of_other_contents_is_damaged_and_one_of_before_begins_anew(
    tmp_path: Path, opened: Opener
) -> None:
    settings = config(algorithm_type="rae")
    learner = await opened(settings)
    await learner.step(played(1), 1)
    await learner.save(tmp_path)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    torch.save({name: value for name, value in state.items() if name != "memory"}, tmp_path / "optimizer.pt")
    assert baselines(await opened(settings, checkpoint=tmp_path)) == {}
    torch.save(state | {"memory": {"basline": {}}}, tmp_path / "optimizer.pt")
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.pt does not fit"):
        await opened(settings, checkpoint=tmp_path)
