"""``trinity-mq debug workflow`` on vLLM: one run of one task, every token with its logprob, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_debug_workflow import command, ended, left

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]


async def test_one_task_on_vllm_without_a_broker(tmp_path: Path) -> None:
    async with command(tmp_path, "--task", "3", "--json", config=EXAMPLES / "smoke-vllm.yaml") as process:
        code, events, err = await ended(process)
    assert code == 0, err
    assert [event["event"] for event in events] == ["task", "call", "experience", "end"]
    task, call, experience, end = events
    assert (task["number"], task["task"]["raw_task"]["question"]) == (3, call["request"]["messages"][0]["content"])
    [choice] = call["choices"]
    assert len(choice["token_texts"]) == len(choice["logprobs"]) > 0
    assert all(logprob < 0 for logprob in choice["logprobs"])
    assert experience["logprobs"] == pytest.approx(choice["logprobs"], abs=1e-6)
    assert experience["versions"] == [[0, 0, 0]]
    assert end["ok"]
    assert left(tmp_path) == [], "no run folder, no files of the engine, no socket of vLLM"
