"""The guard of optimizer steps: what it decides, and that a skipped step leaves no trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.unit.training.test_learner import Opener, batch, config, same, state_of, weights_of
from trinity_mq.config import Config
from trinity_mq.config.agents import GuardConfig
from trinity_mq.experience import Experience
from trinity_mq.training.guard import HISTORY, LEAST_HISTORY, Guard, TrainingStopped, skip_reason
from trinity_mq.training.learner import TorchLearner

WATCHFUL = GuardConfig(max_norm_ratio=10.0, max_mismatch=0.5)
USUAL = [1.0] * LEAST_HISTORY


@pytest.mark.parametrize(
    ("loss", "norm", "mismatch", "reason"),
    [
        (1.0, 1.0, 0.1, None),
        (math.nan, math.nan, 9.0, "nonfinite_loss"),
        (-math.inf, 1.0, None, "nonfinite_loss"),
        (1.0, math.inf, 9.0, "nonfinite_norm"),
        (1.0, math.nan, None, "nonfinite_norm"),
        (1.0, 10.1, 9.0, "norm_spike"),
        (1.0, 10.0, None, None),
        (1.0, 1.0, 0.6, "mismatch"),
        (1.0, 1.0, 0.5, None),
        (1.0, 1.0, None, None),
    ],
)
def test_the_first_thing_that_is_wrong_is_the_reason(
    loss: float, norm: float, mismatch: float | None, reason: str | None
) -> None:
    assert skip_reason(WATCHFUL, USUAL, loss=loss, norm=norm, mismatch=mismatch) == reason


def test_limits_are_off_by_default_and_norms_need_a_history() -> None:
    assert skip_reason(GuardConfig(), USUAL, loss=1.0, norm=1e9, mismatch=1e9) is None
    assert skip_reason(WATCHFUL, USUAL[:-1], loss=1.0, norm=1e9, mismatch=None) is None


def test_a_norm_is_compared_with_the_median_of_the_last_hundred_applied_ones() -> None:
    guard = Guard(WATCHFUL.model_copy(update={"max_consecutive_skips": None}))
    for norm in [100.0] * HISTORY:
        assert guard.judge(loss=1.0, norm=norm) is None
    assert guard.judge(loss=1.0, norm=1001.0) == "norm_spike"
    for _ in range(HISTORY):
        assert guard.judge(loss=1.0, norm=1.0) is None
    assert guard.state()["norms"] == [1.0] * HISTORY, "neither the old ones nor the spike"
    assert guard.judge(loss=1.0, norm=10.1) == "norm_spike"


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6))
def test_it_stops_at_the_first_so_many_in_a_row(fates: list[bool], most: int) -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=most))
    in_a_row = 0
    for fine in fates:
        guard = Guard(guard.settings, guard.state())  # a restart in between changes nothing
        in_a_row = 0 if fine else in_a_row + 1
        if in_a_row == most:
            with pytest.raises(TrainingStopped, match=f"{most} optimizer steps in a row were skipped"):
                guard.judge(loss=1.0, norm=math.nan)
            return
        assert (guard.judge(loss=1.0, norm=1.0 if fine else math.nan) is None) == fine


def test_a_limit_beyond_the_history_of_norms_holds_too() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=HISTORY + 50))
    for _ in range(HISTORY + 49):
        assert guard.judge(loss=math.nan, norm=1.0) == "nonfinite_loss"
    with pytest.raises(TrainingStopped, match="150 optimizer steps in a row"):
        guard.judge(loss=math.nan, norm=1.0)


def test_the_error_says_what_was_seen_and_what_to_do() -> None:
    guard = Guard(WATCHFUL, {"norms": USUAL, "skipped": ["nonfinite_loss", "norm_spike", "norm_spike", "norm_spike"]})
    with pytest.raises(TrainingStopped) as caught:
        guard.judge(loss=0.25, norm=300.0, mismatch=0.01)
    for words in (
        "5 optimizer steps in a row",
        "nonfinite_loss 1, norm_spike 4",
        "trainer.guard.max_consecutive_skips is 5",
        "gradient norm 300",
        "last 20 applied ones 1",
        "mismatch/k3 0.01",
        "trainer.guard.max_norm_ratio",
        "trainer.guard.max_consecutive_skips=null",
    ):
        assert words in str(caught.value)


# -- in the learner


def guarded(**guard: Any) -> Config:
    plain = config()
    return plain.model_copy(
        update={"trainer": plain.trainer.model_copy(update={"guard": GuardConfig.model_validate(guard)})}
    )


def loud(seed: int) -> list[Experience]:
    """A batch whose gradient is a thousand times as large as usual."""
    experiences = batch(seed)
    for one in experiences:
        one.advantages = one.advantages * 1000
    return experiences


async def test_a_spike_is_skipped_and_leaves_weights_moments_and_history_as_they_were(
    opened: Opener, tmp_path: Path
) -> None:
    learner = await opened(guarded(max_norm_ratio=10.0))
    for step in range(1, LEAST_HISTORY + 1):
        metrics = await learner.step(batch(step), step)
        assert metrics["actor/optimizer_steps"] == 1
    await learner.save(tmp_path)
    with capture_logs() as logs:
        metrics = await learner.step(loud(50), 21)
    assert (metrics["actor/optimizer_steps"], metrics["actor/skipped_norm_spike"]) == (0, 1)
    assert sum(value for name, value in metrics.items() if name.startswith("actor/skipped_")) == 1
    assert [(one["event"], one["reason"]) for one in logs] == [("optimizer_step_skipped", "norm_spike")]
    untouched = await opened(guarded(max_norm_ratio=10.0), checkpoint=tmp_path)
    norms = [(await state_of(one))["memory"].facts["guard"]["norms"] for one in (learner, untouched)]
    assert norms[0] == norms[1] != [], "the checkpoint has them"
    for one in (learner, untouched):
        metrics = await one.step(batch(60), 22)
        assert metrics["actor/optimizer_steps"] == 1
    assert same(await weights_of(learner), await weights_of(untouched))
    unguarded = await opened(guarded(), checkpoint=tmp_path)
    metrics = await unguarded.step(loud(50), 21)
    assert metrics["actor/optimizer_steps"] == 1, "off by default"
    assert metrics["actor/grad_norm"] > 10 > metrics["actor/grad_norm_clipped"] == 1.0


def with_a_weight_that_is_no_number(learner: TorchLearner, experiences: list[Experience]) -> None:
    with torch.no_grad():
        learner.policy.parameters[0][5] = math.nan


def with_a_gradient_that_overflows(learner: TorchLearner, experiences: list[Experience]) -> None:
    learner.policy.parameters[0].register_hook(lambda gradient: gradient * math.inf)


def sampled_by_other_weights(learner: TorchLearner, experiences: list[Experience]) -> None:
    for one in experiences:
        one.logprobs = one.logprobs - 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_a_weight_that_is_no_number, "nonfinite_loss"),
        (with_a_gradient_that_overflows, "nonfinite_norm"),
        (sampled_by_other_weights, "mismatch"),
    ],
)
async def test_a_step_is_skipped_for_its_reason(opened: Opener, spoil: Any, reason: str) -> None:
    learner, experiences = await opened(guarded(max_mismatch=0.5)), batch(1)
    spoil(learner, experiences)
    metrics = await learner.step(experiences, 1)
    assert (metrics["actor/optimizer_steps"], metrics[f"actor/skipped_{reason}"]) == (0, 1)
    assert all(map(math.isfinite, metrics.values()))
    if reason == "mismatch":
        assert metrics["mismatch/k3"] > 0.5, "what was wrong is told"
        metrics = await learner.step(batch(1), 2)
        assert (metrics["actor/optimizer_steps"], metrics["actor/skipped_mismatch"]) == (1, 0)
