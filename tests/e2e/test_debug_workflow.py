"""``trinity-mq debug workflow`` as a person gives it: an engine of its own, no broker, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.unit.workflows.tiny_engines import make_generator, tiny_engine
from trinity_mq.runtime.process import wait_exit

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
START_SECONDS = 300.0
LEASE = 5.0

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(700)]

MINE = """
import asyncio
from trinity_mq.workflows import Workflow

class Waits(Workflow):
    is_async = True

    async def run_async(self):
        print("waiting")
        await asyncio.Event().wait()

class Kills(Workflow):
    is_async = True

    async def run_async(self):
        import contextlib, psutil
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return await self.model.chat_async([{"role": "user", "content": "1,2,3="}])

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


async def waiting(process: asyncio.subprocess.Process) -> Sequence[int]:
    """The engine's process, once the workflow of the user's own is running."""
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        while (line := await process.stderr.readline()) != b"waiting\n":
            assert line, "it ended before its workflow ran"
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


async def gone(pids: Sequence[int], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        for pid in pids:
            await wait_exit(pid)


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


@pytest.mark.extended
async def test_an_auxiliary_model_may_be_served_elsewhere(folder: Path) -> None:
    """By our own engine here: an OpenAI-compatible server like any."""
    settings = yaml.safe_load(EXAMPLE.read_text())
    settings["buffer"]["taskset"]["workflow"] = "mine.Judged"
    generator = await asyncio.to_thread(make_generator, folder / "elsewhere", characters="abc", max_model_len=64)
    async with tiny_engine(generator, "their-model", lease=2 * START_SECONDS) as served:
        judge = {"name": "judge", "engine": "external", "url": f"{served.url}/v1", "served_name": "their-model"}
        settings["explorer"]["auxiliary_models"] = [judge]
        config = folder / "judged.yaml"
        config.write_text(yaml.safe_dump(settings))
        async with command(folder, "--json", config=config) as process:
            code, events, err = await ended(process)
    assert code == 0, err
    first, second = [event for event in events if event["event"] == "call"]
    assert (first["engine"], second["engine"]) == (None, "judge")
    assert second["request"]["messages"] == [{"role": "user", "content": "ab"}]
    (choice,) = second["choices"]
    assert set(choice["text"]) <= set("abc<eopsad>")
    assert (events[-1]["calls"], events[-1]["metrics"]["reward"]) == (2, 1.0)
    assert left(folder) == []


@pytest.mark.extended
async def test_interrupted_it_ends_its_engine(folder: Path) -> None:
    async with command(folder, "buffer.taskset.workflow=mine.Waits", "--json") as process:
        pids = await waiting(process)
        assert pids
        process.send_signal(signal.SIGTERM)
        code, _, err = await ended(process)
        assert (code, err.splitlines()[-1]) == (130, "interrupted")
        await gone(pids, 1.0)
    assert left(folder) == []


@pytest.mark.extended
async def test_killed_it_leaves_an_engine_that_ends_by_its_lease(folder: Path) -> None:
    lease = f"explorer.rollout_model.lease={LEASE}"
    async with command(folder, "buffer.taskset.workflow=mine.Waits", lease) as process:
        pids = await waiting(process)
        assert pids
        process.kill()
        await process.wait()
        await gone(pids, LEASE + 60.0)


@pytest.mark.extended
async def test_an_engine_that_dies_is_the_end(folder: Path) -> None:
    async with command(folder, "buffer.taskset.workflow=mine.Kills", "--json") as process:
        code, events, err = await ended(process)
    assert code == 2, err
    assert "trinity-mq debug: the engine died" in err
    assert [event["event"] for event in events][:1] == ["task"]
    assert left(folder) == []
