"""``trinity-mq debug workflow`` as a person gives it: an engine of its own, no broker, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
START_SECONDS = 300.0

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(700)]

MINE = """
from trinity_mq.workflows import Workflow

class Judged(Workflow):
    is_async = True

    async def run_async(self):
        [one] = await self.model.chat_async([{"role": "user", "content": "1,2,3="}])
        [judge], [view] = self.auxiliary_models, self.auxiliary_model_wrappers
        said = await judge.chat.completions.create(
            model=view.model_name, messages=[{"role": "user", "content": "ab"}], max_tokens=2
        )
        one.reward = float(len(said.choices))
        return [one]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@asynccontextmanager
async def command(folder: Path, *words: str, config: Path = EXAMPLE) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trinity_mq.cli.main", "debug", "workflow", str(config), *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=folder,
        env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[dict[str, Any]], str]:
    async with asyncio.timeout(START_SECONDS):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.decode().splitlines()], err.decode()


def left(folder: Path) -> list[str]:
    """What is ours; torch has a cache of its own."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("tmq", "runs")))


async def test_one_task_without_a_broker(folder: Path) -> None:
    async with command(folder, "--task", "3", "--json") as process:
        code, events, err = await ended(process)
    assert code == 0, err
    assert [event["event"] for event in events] == ["task", "call", "experience", "end"]
    task, call, experience, end = events
    assert (task["number"], task["task"]["raw_task"]["question"]) == (3, call["request"]["messages"][0]["content"])
    assert experience["logprobs"] == pytest.approx(call["choices"][0]["logprobs"], abs=1e-6)
    assert experience["versions"] == [[0, 0, 0]]
    assert end["ok"]
    assert left(folder) == [], "no run folder, no files of the engine"


@pytest.mark.extended
async def test_auxiliary_models_are_there_and_seen(folder: Path) -> None:
    settings = yaml.safe_load(EXAMPLE.read_text())
    judge = {"tiny": {"characters": "abc"}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 8}
    settings["explorer"]["auxiliary_models"] = [{"name": "judge", "model": judge}]
    settings["buffer"]["taskset"]["workflow"] = "mine.Judged"
    config = folder / "judged.yaml"
    config.write_text(yaml.safe_dump(settings))
    async with command(folder, "--json", config=config) as process:
        code, events, err = await ended(process)
    assert code == 0, err
    first, second = [event for event in events if event["event"] == "call"]
    assert (first["number"], first["engine"], second["number"], second["engine"]) == (1, None, 2, "judge")
    assert set("".join(second["choices"][0]["token_texts"])) <= set("abc<eopsad>")
    assert (events[-1]["calls"], events[-1]["metrics"]["reward"]) == (2, 1.0)
    assert left(folder) == []
