"""Configurations of Trinity-RFT, migrated, and run with a tiny model on records of the form of their own data."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.trinity_configs import GSM8K
from trinity_mq.cli.main import main
from trinity_mq.testing.runs import LocalRun

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.extended, pytest.mark.timeout(400)]

TINY_TOKENS = 2048
TINY = {
    "tiny": {
        "characters": "".join(dict.fromkeys(string.printable)),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": TINY_TOKENS,
    },
    "max_model_len": TINY_TOKENS,
    "max_prompt_tokens": TINY_TOKENS - 8,
    "max_response_tokens": 8,
}
"""Takes the place of a model of the hub."""
SMALL: dict[str, Any] = {
    "model": TINY,
    "buffer": {"batch_size": 2, "total_steps": 2},
    "monitor": {"tensorboard": False},
    "trainer": {"save_interval": 2},
}
"""Sizes of a run of two steps."""
ROLLOUTS: dict[str, Any] = {
    "algorithm": {"repeat_times": 2},
    "explorer": {"max_timeout": 60, "eval_on_startup": False, "rollout_model": {"engine": "transformers"}},
    "runner": {"num_runners": 1, "concurrency": 4},
    "synchronizer": {"sync_method": "collective"},
}
"""Sizes of its rollouts, without a GPU."""
ONLY_VLLM = ("engine_num", "tensor_parallel_size", "vllm")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and key != "model"
    }
    return {**base, **over, **inner}


def questions(path: Path) -> str:
    records = [{"question": f"What is {n} + 3?", "answer": f"{n} + 3 = {n + 3}\n#### {n + 3}"} for n in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def migrated(source: Path) -> dict[str, Any]:
    """Return the configuration that ``trinity-mq migrate`` writes."""
    out = source.with_suffix(".ours.yaml")
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    settings: dict[str, Any] = yaml.safe_load(out.read_text())
    return settings


def small(settings: dict[str, Any], sizes: Mapping[str, Any], path: Path) -> Path:
    """Write a configuration with a tiny model and the sizes of a test."""
    for key in ONLY_VLLM:
        settings.get("explorer", {}).get("rollout_model", {}).pop(key, None)
    settings.get("synchronizer", {}).pop("backend", None)
    path.write_text(yaml.safe_dump(merged(settings, sizes)))
    return path


async def test_rollouts_of_a_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_TASKSET_PATH", questions(tmp_path / "tasks.jsonl"))
    source = tmp_path / "gsm8k.yaml"
    source.write_text(yaml.safe_dump(GSM8K))
    config = small(migrated(source), merged(SMALL, ROLLOUTS), tmp_path / "small.yaml")
    async with LocalRun(config, tmp_path / "run") as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    assert [step for step, _ in run.values("trainer/step")] == [1, 2]
    assert [step for step, _ in run.values("eval/gsm8k-eval/accuracy")] == [2] or "gsm8k-eval accuracy" in output


async def answer(request: web.Request) -> web.Response:
    """Answer as a service whose model always says 4."""
    asked = await request.json()
    message = {"role": "assistant", "content": "The answer is \\boxed{4}"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    kind = {"id": "a", "object": "chat.completion", "created": 1, "model": asked["model"]}
    return web.json_response({**kind, "choices": [choice] * int(asked.get("n") or 1), "usage": usage})


async def test_an_external_model_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = web.Application()
    service.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(service)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("TRINITY_TASKSET_PATH", questions(tmp_path / "tasks.jsonl"))
    explorer_input = {
        "eval_tasksets": [{**GSM8K["buffer"]["explorer_input"]["eval_tasksets"][0], "name": "held_out"}],
        "default_eval_workflow_type": "math_workflow",
    }
    theirs = {
        "mode": "bench",
        "name": "external",
        "model": {"model_path": "big", "max_model_len": 1024, "external_model": {"enable": True, "model_name": "big"}},
        "buffer": {"batch_size": 4, "explorer_input": explorer_input},
    }
    source = tmp_path / "external.yaml"
    source.write_text(yaml.safe_dump(theirs))
    ours = migrated(source)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(merged(ours, {"runner": {"num_runners": 1, "concurrency": 4}})))
    async with LocalRun(config, tmp_path / "run") as run:
        code, output = await run.ended(200.0)
    await runner.cleanup()
    assert code == 0, output
    run.run_dir = tmp_path / "run-bench"
    assert dict(run.values("eval/held_out/accuracy/mean@1")) == {0: 0.25}, "of 3, 4, 5 and 6"
