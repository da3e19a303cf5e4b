"""Two engines in the gate, hosted by two processes; one is killed in the middle of the smoke example."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"
ENGINES = ("explorer-0-engine", "engines-1-engine")

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(700)]


@asynccontextmanager
async def engines_only(run: LocalRun, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``trinity-mq explorer --engines-only`` for a run, ended if it does not end by itself."""
    config = str(run.run_dir / "config.yaml")
    command = (sys.executable, "-m", "trinity_mq.cli.main", "explorer", config, "--engines-only", "--id", name)
    output = (run.run_dir / "logs" / f"{name}.out").open("wb")
    process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=asyncio.subprocess.STDOUT)
    try:
        yield process
    finally:
        output.close()
        if process.returncode is None:
            process.terminate()
            await process.wait()


def logged(run: LocalRun, who: str, event: str) -> list[dict[str, Any]]:
    """What an agent or engine has logged of one kind so far."""
    path = run.run_dir / "logs" / f"{who}.jsonl"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if f'"{event}"' in line]
    return [json.loads(line) for line in lines]


def commits(run: LocalRun, engine: str) -> list[tuple[int, int]]:
    """The versions an engine has committed, in all its lives."""
    return [tuple(line["version"]) for line in logged(run, engine, "weights_committed")]  # type: ignore[misc]


def in_gate(run: LocalRun, more: int = 0) -> Callable[[], bool]:
    """Whether the engines' latest commits are of one version, and not of the first ones."""

    def both() -> bool:
        last = [commits(run, engine)[-1:] for engine in ENGINES]
        return bool(last[0]) and last[0] == last[1] and all(len(commits(run, engine)) > more for engine in ENGINES)

    return both


@contextmanager
def no_batch_ends(run: LocalRun) -> Iterator[None]:
    """Keep the run from ending before an engine is up, however slow this machine is."""
    run.kill("operator-0", signal.SIGSTOP)
    try:
        yield
    finally:
        run.kill("operator-0", signal.SIGCONT)


async def test_one_of_two_engines_is_killed_and_the_run_goes_on_and_learns(tmp_path: Path) -> None:
    # a batch does not fail while its manifest waits for a frozen operator
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", ["explorer.operator_deadline=3000"]) as run:
        await run.until((tmp_path / "run" / "broker.url").exists, 60.0)
        async with engines_only(run, "engines-1") as host:
            await run.until(lambda: run.pid("operator-0") is not None, 100.0)
            with no_batch_ends(run):
                await run.until(in_gate(run), 200.0)
            await run.until(in_gate(run, more=2), 200.0)
            ready = ReadyFile.read(run.run_dir / "engines" / f"{ENGINES[1]}.ready.json")
            assert ready is not None
            killed_at = len(commits(run, ENGINES[1]))
            os.kill(ready.pid, signal.SIGKILL)
            # the other one serves
            await run.until_progress(max(step for step, _ in run.values("trainer/step")) + 3, 100.0)
            assert logged(run, "engines-1", "engine_died")
            # its host starts it again and it is given the weights of the day
            with no_batch_ends(run):
                await run.until(in_gate(run, more=killed_at), 200.0)
            code, output = await run.ended(300.0)
            assert code == 0, output
            assert await asyncio.wait_for(host.wait(), 60.0) == 0, "the run is over, and so is the host"
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[60] >= accuracy[0] + 0.4
    finished = dict(run.values("rollout/finished_task_count"))
    assert finished == dict.fromkeys(range(1, 61), 16.0), "the runs of the killed engine were done elsewhere"
    # after each sync all members have the same version: what both committed they committed in the same order
    both = [commits(run, engine) for engine in ENGINES]
    assert both[0][-1] == both[1][-1]
    assert both[0] == sorted(both[0])
    assert both[1] == sorted(both[1])
    assert set(both[1]) <= set(both[0])
    served = {engine: logged(run, engine, "engine_done")[-1]["sequences"] for engine in ENGINES}
    assert min(served.values()) > 0, f"both have answered: {served}"
