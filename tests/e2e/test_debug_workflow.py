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

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
START_SECONDS = 300.0

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(700)]


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


async def test_one_task_without_a_broker(tmp_path: Path) -> None:
    async with command(tmp_path, "--task", "3", "--json") as process:
        code, events, err = await ended(process)
    assert code == 0, err
    assert [event["event"] for event in events] == ["task", "call", "experience", "end"]
    task, call, experience, end = events
    assert (task["number"], task["task"]["raw_task"]["question"]) == (3, call["request"]["messages"][0]["content"])
    assert experience["logprobs"] == pytest.approx(call["choices"][0]["logprobs"], abs=1e-6)
    assert experience["versions"] == [[0, 0, 0]]
    assert end["ok"]
    assert left(tmp_path) == [], "no run folder, no files of the engine"
