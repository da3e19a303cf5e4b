"""The smoke example as a stranger runs it: real broker, real processes, a real model that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.metric_names import undocumented
from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_it_learns_and_leaves_behind_what_it_promises(tmp_path: Path) -> None:
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run") as run:
        code, output = await run.ended(300.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, 30, 60}
    assert accuracy[60] >= accuracy[0] + 0.4
    assert run.values("eval/max3_held_out/version/min")[-1] == (60, 60.0), "the final weights were evaluated"
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
    assert list((tmp_path / "run" / "tensorboard").rglob("events.out.tfevents.*"))
    for log in (tmp_path / "run" / "logs").glob("*.jsonl"):
        assert all(json.loads(line)["level"] in {"info", "warning"} for line in log.read_text().splitlines()), (
            log.read_text()
        )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    inputs = tokenizer("3,7,2=", return_tensors="pt", add_special_tokens=False)
    answer = model.generate(input_ids=inputs["input_ids"], max_new_tokens=2, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    assert "report" in output.lower() or "accuracy" in output.lower()
    history = lineage(tmp_path / "run" / "history", 1, 60)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(uids) == len(set(uids)) == 60 * 16 * 8
    # once finished, the same command only tells
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run") as again:
        code, output = await again.ended(30.0)
    assert code == 0
    assert len(run.metrics()) == len(again.metrics())


async def test_each_process_gets_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs are pretended, so that everything computes on the CPU. /proc shows forked processes the environment of
    their parent, so each process reports its own in its first line.
    """
    monkeypatch.setenv("TRINITY_MQ_PRETEND_GPUS", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    short = ("buffer.total_steps=2", "explorer.eval_on_startup=false", "buffer.eval_tasksets=[]")
    judge = "explorer.auxiliary_models=[{name: judge, model: {tiny: {}}}]"
    several = ("trainer.nproc=2", "explorer.rollout_model.engine_num=2", "runner.num_runners=1", judge)
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", [*short, *several]) as run:
        code, output = await run.ended(300.0)
    assert code == 0, output
    first = {log.stem: json.loads(log.read_text().splitlines()[0]) for log in (run.run_dir / "logs").glob("*.jsonl")}
    assert {name: line.get("devices") for name, line in first.items() if name != "supervisor"} == {
        "trainer-0": ["0", "1"],
        "trainer-0-rank-1": ["0", "1"],
        "explorer-0-engine": ["2"],
        "explorer-0-engine-1": ["3"],
        "explorer-0-auxiliary-judge": ["4"],
        "explorer-0": [],
        "runner-0": [],
        "operator-0": [],
    }
    assert first["trainer-0-rank-1"]["device"] == 1, "the second of these GPUs"
    assert "GPUs: trainer-0 on 0,1; explorer-0-engine on 2; explorer-0-engine-1 on 3" in " ".join(output.split())
