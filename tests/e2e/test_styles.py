"""Every style with real processes, a real broker and a real model: it ends, learns, and trains on nothing too old."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import load_config
from trinity_mq.observability.timeline import spans
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
REWARD = "rollout/reward/mean"
DIFFERENCE = "rollout/rollout_vs_train_logprob_diff/max"
AGE = "sample/staleness/max"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


async def run_to_its_end(folder: Path, steps: int, *overrides: str) -> LocalRun:
    settings = (f"buffer.total_steps={steps}", "explorer.eval_interval=1000", "trainer.save_interval=1000", *overrides)
    async with LocalRun(SMOKE, folder, settings) as run:
        code, output = await run.ended(240.0)
    assert code == 0, output
    assert "timeline" in output
    assert run.values("eval/max3_held_out/version/min")[-1] == (
        steps,
        max(step for _, step in run.values("trainer/step")),
    )
    return run


def mean(values: list[Any]) -> float:
    return math.fsum(value for _, value in values) / len(values)


@pytest.mark.extended
@pytest.mark.parametrize("style", ["trainer_driven", "explorer_driven", "fully_async"])
async def test_it_ends_learns_and_trains_on_nothing_older_than_allowed(tmp_path: Path, style: str) -> None:
    settings = (f"synchronizer.sync_style={style}", "synchronizer.sync_interval=2", "synchronizer.sync_offset=0")
    run = await run_to_its_end(tmp_path / "run", 30, *settings)
    bound = load_config(str(SMOKE), settings).synchronizer.effective_max_staleness
    ages, rewards = run.values(AGE), run.values(REWARD)
    assert max(age for _, age in ages) <= bound
    assert [step for step, _ in ages] == list(range(1, 31))
    assert all(0 <= age <= bound for _, age in run.values("sample/staleness/mean"))
    assert mean(rewards[-6:]) > mean(rewards[:6]) + 0.03, rewards
    dropped = sum(value for _, value in run.values("sample/dropped_stale_groups"))
    trained = sum(value for _, value in run.values("sample/experiences"))
    assert trained + 8 * dropped == 30 * 16 * 8


async def test_fixed_with_interval_1_and_offset_0_is_on_policy(tmp_path: Path) -> None:
    run = await run_to_its_end(tmp_path / "run", 10, "synchronizer.sync_interval=1", "synchronizer.sync_offset=0")
    differences, ratios = run.values(DIFFERENCE), run.values("actor/ratio_max")
    assert [step for step, _ in differences] == [step for step, _ in ratios] == list(range(1, 11))
    assert max(math.expm1(value) for _, value in differences) < 1e-4, "of exp(|new - old|), the ratio either way"
    assert max(abs(value - 1) for _, value in ratios) < 1e-4
    assert {age for _, age in run.values(AGE)} == {0.0}
    check_the_timeline(run)
    check_the_phases(run)


def check_the_timeline(run: LocalRun) -> None:
    """One period after another, as in the documented timeline: the batch, then its step, then the sync.

    The explorer hears of its batch's last slice from the runner, the trainer from the operator: neither waits for the
    other.
    """
    trace = json.loads((run.run_dir / "timeline.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    every = spans(run.metrics())
    explored = {one.step: one for one in every if one.what == "explore"}
    trained = {one.step: one for one in every if one.what == "train"}
    synced = {one.step: one for one in every if one.what == "sync"}
    assert set(explored) == set(trained) == set(range(1, 11))
    assert set(range(11)) == set(synced)
    for step in range(1, 11):
        assert explored[step].start < trained[step].start
        assert explored[step].end < synced[step].end
        assert trained[step].end <= synced[step].start + 0.02
        if step > 1:
            assert synced[step - 1].start < explored[step].start, "on-policy: it was opened after the commit"
        assert {f"explore {step}", f"train {step}"} <= names


def check_the_phases(run: LocalRun) -> None:
    for phase in ("wait", "pause", "transfer", "apply", "resume"):
        values = run.values(f"sync/{phase}_ms")
        assert values, phase
        assert all(0 <= value < 60_000 for _, value in values), (phase, values)
