"""On-policy training with real processes, a real broker and a real model: no token is older than its train step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trinity_mq.observability.timeline import spans
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
DIFFERENCE = "rollout/rollout_vs_train_logprob_diff/max"
AGE = "sample/staleness/max"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


async def test_fixed_with_interval_1_and_offset_0_is_on_policy(tmp_path: Path) -> None:
    settings = (
        *("buffer.total_steps=10", "explorer.eval_interval=1000", "trainer.save_interval=1000"),
        *("synchronizer.sync_interval=1", "synchronizer.sync_offset=0"),
    )
    async with LocalRun(SMOKE, tmp_path / "run", settings) as run:
        code, output = await run.ended(240.0)
    assert code == 0, output
    assert "timeline" in output
    assert run.values("eval/max3_held_out/version/min")[-1] == (10, 10.0)
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
