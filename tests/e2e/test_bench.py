"""Mode bench as a stranger runs it: every checkpoint of a run, evaluated as the run itself did, whatever is killed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
SET = "eval/max3_held_out"
TRAINED = (
    "buffer.total_steps=8",
    "trainer.save_interval=1",
    "trainer.max_checkpoints_to_keep=20",
    "explorer.eval_interval=2",
    "buffer.eval_tasksets.0.repeat_times=4",
    "buffer.eval_tasksets.0.limit=50",
    "explorer.max_repeat_times_per_runner=3",  # two slices a task
)
LABELS = list(range(9))

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(400)]

NAMES = [f"{SET}/{name}" for name in ("accuracy/mean@4", "pass@4", "reward/mean@4", "response_tokens/mean@4")]
"""What does not depend on the time that it took."""


async def test_each_checkpoint_is_evaluated_as_the_run_did(tmp_path: Path) -> None:
    async with LocalRun(EXAMPLE, tmp_path / "run", TRAINED) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    async with LocalRun(EXAMPLE, tmp_path / "run", (*TRAINED, "mode=bench")) as bench:
        code, output = await bench.ended(200.0)
    assert code == 0, output
    bench.run_dir = tmp_path / "run-bench"
    found = {name: dict(sorted(bench.values(name))) for name in NAMES}
    # the run's own evaluations name the step of their weights, which may be the one before that of their label
    version = dict(run.values(f"{SET}/version/max"))
    assert sorted(version) == [0, 2, 4, 6, 8]
    for name in NAMES:
        for label, value in run.values(name):
            assert found[name][int(version[label])] == value, (name, label, version[label])
    assert list(found[f"{SET}/accuracy/mean@4"]) == LABELS
    assert len(set(found[f"{SET}/reward/mean@4"].values())) > 1
    assert "run smoke-bench: 9 checkpoints" in output
    assert "max3_held_out pass@4" in output
    with (tmp_path / "run-bench" / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == LABELS
    in_table = [float(row["max3_held_out/reward/mean@4"]) for row in rows]
    assert in_table == list(found[f"{SET}/reward/mean@4"].values())
    assert "<svg" in (tmp_path / "run-bench" / "report.html").read_text()
    # nothing is left to do, until there is another checkpoint
    async with LocalRun(EXAMPLE, tmp_path / "run", (*TRAINED, "mode=bench")) as again:
        code, output = await again.ended(60.0)
    assert (code, "this run has finished" in output) == (0, True), output
