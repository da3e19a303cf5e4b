"""Mode bench as a stranger runs it: every checkpoint of a run, evaluated as the run itself did, whatever is killed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
SET = "eval/max3_held_out"
TRAINED = (
    "buffer.total_steps=20",
    "trainer.save_interval=5",
    "trainer.max_checkpoints_to_keep=9",
    "explorer.eval_interval=5",
    "buffer.eval_tasksets.0.repeat_times=4",
    "buffer.eval_tasksets.0.limit=50",
    "explorer.max_repeat_times_per_runner=3",  # two slices a task
    "synchronizer.sync_offset=0",  # so that an evaluation is by the weights of its step
)
LABELS = [0, 5, 10, 15, 20]

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(400)]


async def trained(folder: Path) -> LocalRun:
    async with LocalRun(EXAMPLE, folder / "run", TRAINED) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    return run


def figures(run: LocalRun) -> dict[str, list[tuple[int, float]]]:
    """What does not depend on the time that it took."""
    names = [
        f"{SET}/{name}" for name in ("accuracy/mean@4", "pass@2", "pass@4", "reward/mean@4", "response_tokens/mean@4")
    ]
    return {name: sorted(dict(run.values(name)).items()) for name in names}


async def test_each_checkpoint_is_evaluated_as_the_run_did(tmp_path: Path) -> None:
    run = await trained(tmp_path)
    async with LocalRun(EXAMPLE, tmp_path / "run", (*TRAINED, "mode=bench")) as bench:
        code, output = await bench.ended(200.0)
    assert code == 0, output
    bench.run_dir = tmp_path / "run-bench"
    assert figures(bench) == figures(run)
    assert [step for step, _ in figures(bench)[f"{SET}/accuracy/mean@4"]] == LABELS
    assert "run smoke-bench: 5 checkpoints" in output
    assert "max3_held_out pass@4" in output
    with (tmp_path / "run-bench" / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == LABELS
    assert [float(row["max3_held_out/reward/mean@4"]) for row in rows] == [
        value for _, value in figures(run)[f"{SET}/reward/mean@4"]
    ]
    assert "<svg" in (tmp_path / "run-bench" / "report.html").read_text()
    # nothing is left to do, until there is another checkpoint
    async with LocalRun(EXAMPLE, tmp_path / "run", (*TRAINED, "mode=bench")) as again:
        code, output = await again.ended(60.0)
    assert (code, "this run has finished" in output) == (0, True), output


@pytest.mark.extended
@pytest.mark.chaos
async def test_kills_cost_time_and_nothing_else(tmp_path: Path) -> None:
    run = await trained(tmp_path)
    async with LocalRun(EXAMPLE, tmp_path / "run", (*TRAINED, "mode=bench")) as bench:
        bench.run_dir = tmp_path / "run-bench"
        for number, agent in enumerate(("trainer-0", "explorer-0", "runner-0"), 1):
            await bench.until(lambda number=number: len(bench.values(f"{SET}/accuracy/mean@4")) >= number, 100.0)
            bench.kill(agent)
        await bench.until(lambda: len(bench.values(f"{SET}/accuracy/mean@4")) >= 4, 100.0)
        bench.kill("engine")
        code, output = await bench.ended(200.0)
    assert code == 0, output
    assert figures(bench) == figures(run)
