"""The smoke example as a stranger runs it: real broker, real processes, a real model that learns; then mode bench,
which evaluates each of its checkpoints as the run itself did.
"""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.metric_names import undocumented
from tests.processes import completed
from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
SET = "eval/max3_held_out"
SETTINGS = (
    "trainer.save_interval=15",
    "trainer.max_checkpoints_to_keep=20",
    "buffer.eval_tasksets.0.repeat_times=4",
    "buffer.eval_tasksets.0.limit=50",
    "explorer.max_repeat_times_per_runner=3",  # two slices of an evaluated task, three of a trained one
)
CHECKPOINTS = [0, 15, 30, 45, 60]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalRun, str]:
    return asyncio.run(completed(SMOKE, tmp_path_factory.mktemp("smoke") / "run", SETTINGS))


async def test_it_learns_and_leaves_behind_what_it_promises(finished: tuple[LocalRun, str]) -> None:
    run, output = finished
    accuracy = dict(run.values(f"{SET}/accuracy/mean@4"))
    assert set(accuracy) == {0, 30, 60}
    assert accuracy[60] >= accuracy[0] + 0.4
    assert run.values(f"{SET}/version/min")[-1] == (60, 60.0), "the final weights were evaluated"
    names = {name for line in run.metrics() for name in line}
    assert {
        "rollout/reward/mean",
        "rollout/finished_task_count",
        "actor/pg_loss",
        "actor/grad_norm",
        "time/train_step",
        "sample/staleness/max",
        "time/sync",
    } <= names
    assert undocumented(names) == set()
    assert max(age for _, age in run.values("sample/staleness/max")) <= 1
    assert {"time", "role", "step"} <= set(run.metrics()[0])
    assert list((run.run_dir / "tensorboard").rglob("events.out.tfevents.*"))
    for log in (run.run_dir / "logs").glob("*.jsonl"):
        lines = log.read_text().splitlines()
        assert {json.loads(line)["level"] for line in lines} <= {"info", "warning"}, lines
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "final")
    inputs = tokenizer("3,7,2=", return_tensors="pt", add_special_tokens=False)
    answer = model.generate(input_ids=inputs["input_ids"], max_new_tokens=2, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    assert "report" in output.lower() or "accuracy" in output.lower()
    history = lineage(run.run_dir / "history", 1, 60)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(uids) == len(set(uids)) == 60 * 16 * 8
    # once finished, the same command only tells
    again, _ = await completed(SMOKE, run.run_dir, SETTINGS, seconds=30.0)
    assert len(run.metrics()) == len(again.metrics())


async def test_mode_bench_evaluates_each_checkpoint_as_the_run_did(finished: tuple[LocalRun, str]) -> None:
    run, _ = finished
    bench, output = await completed(SMOKE, run.run_dir, (*SETTINGS, "mode=bench"), seconds=200.0)
    bench.run_dir = run.run_dir.with_name("run-bench")
    # the run's own evaluations name the step of their weights, which may be the one before that of their label
    version = {step: int(value) for step, value in run.values(f"{SET}/version/max")}
    assert sorted(version) == [0, 30, 60]
    # these do not depend on the time that they took
    for name in ("accuracy/mean@4", "pass@4", "reward/mean@4", "response_tokens/mean@4"):
        benched = dict(bench.values(f"{SET}/{name}"))
        assert sorted(benched) == CHECKPOINTS
        same = {step: value for step, value in run.values(f"{SET}/{name}") if version[step] in benched}
        assert same.keys() >= {0, 60}
        assert {step: benched[version[step]] for step in same} == same, name
    rewards = dict(sorted(bench.values(f"{SET}/reward/mean@4")))
    assert len(set(rewards.values())) > 1
    assert "run smoke-bench: 5 checkpoints" in output
    assert "max3_held_out pass@4" in output
    with (bench.run_dir / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["max3_held_out/reward/mean@4"])) for row in rows] == list(rewards.items())
    assert "<svg" in (bench.run_dir / "report.html").read_text()
    # nothing is left to do, until there is another checkpoint
    _, output = await completed(SMOKE, run.run_dir, (*SETTINGS, "mode=bench"), seconds=60.0)
    assert "this run has finished" in output
