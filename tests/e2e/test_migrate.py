"""Three configurations of Trinity-RFT, rewritten by ``trinity-mq migrate``, run for some steps on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.byte_model import make_model
from tests.trinity_configs import DPO, GSM8K, GSM8K_STAGES
from trinity_mq.cli.main import main
from trinity_mq.testing.runs import LocalRun

PROBLEMS = [
    {
        "question": f"Ann has {n} pears and buys {n + 2} more. How many has she?",
        "answer": f"{n}+{n + 2}\n#### {2 * n + 2}",
    }
    for n in range(1, 25)
]
SMALL = (
    "model.max_model_len=256",
    "model.max_response_tokens=8",
    "model.max_prompt_tokens=248",
    "explorer.rollout_model.engine=transformers",
    "synchronizer.sync_method=collective",
    "explorer.max_consecutive_empty=10",
)

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "model", [one["question"] for one in PROBLEMS])
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(tmp_path / "model"))
    return tmp_path


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def migrated(source: dict[str, Any], folder: Path) -> Path:
    (folder / "trinity.yaml").write_text(yaml.safe_dump(source))
    assert main(["migrate", str(folder / "trinity.yaml"), "-o", str(folder / "ours.yaml")]) == 0
    return folder / "ours.yaml"


async def test_gsm8k_grpo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_TASKSET_PATH", lines(folder / "train.jsonl", PROBLEMS))
    small = (*SMALL, "buffer.batch_size=4", "algorithm.repeat_times=4", "buffer.total_steps=3")
    async with LocalRun(migrated(GSM8K, folder), folder / "run", small) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    assert [step for step, _ in run.values("trainer/step")] == [1, 2, 3]
    assert [step for step, _ in run.values("eval/gsm8k-eval/accuracy/mean@1")] == [0, 3]


async def test_sft_then_rl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [
        {"messages": [{"role": "user", "content": one["question"]}, {"role": "assistant", "content": one["answer"]}]}
        for one in PROBLEMS
    ]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", lines(folder / "train.jsonl", PROBLEMS))
    monkeypatch.setenv("TRINITY_SFT_DATASET_PATH", lines(folder / "sft.jsonl", turns))
    small = (
        *SMALL[:3],
        "stages.0.buffer.batch_size=8",
        "stages.0.buffer.total_steps=3",
        *(f"stages.1.{word}" for word in SMALL[3:]),
        "stages.1.algorithm.repeat_times=4",
        "stages.1.buffer.batch_size=4",
        "stages.1.buffer.total_steps=2",
    )
    async with LocalRun(migrated(GSM8K_STAGES, folder), folder / "run", small) as run:
        code, output = await run.ended(250.0)
    assert code == 0, output
    steps = [
        [step for step, _ in LocalRun(folder / "ours.yaml", folder / f"run-{stage}").values("trainer/step")]
        for stage in ("sft-warmup", "rft")
    ]
    assert steps == [[1, 2, 3], [1, 2]]


async def test_dpo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"prompt": one["question"], "chosen": one["answer"], "rejected": "no idea"} for one in PROBLEMS]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", lines(folder / "pairs.jsonl", pairs))
    small = (*SMALL[:3], "buffer.batch_size=8", "buffer.total_steps=5", "algorithm.optimizer.lr=1e-3")
    async with LocalRun(migrated(DPO, folder), folder / "run", small) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    margins = dict(run.values("actor/pair_margin"))
    assert sorted(margins) == [1, 2, 3, 4, 5]
    assert margins[5] > margins[1]
