"""Commands that tests run, and the processes below another."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[1]


async def command(*words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run ``trinity-mq`` and return its exit code, its output and its errors."""
    return await python("-m", "trinity_mq.cli.main", *words, env=env)


async def python(*words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run Python in the folder of the checkout and return its exit code, its output and its errors."""
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, env=env, stdin=nothing, stdout=pipe, stderr=pipe
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode(errors="replace")


async def completed(
    config: Path, folder: Path, settings: Sequence[str] = (), *, seconds: float = 300.0
) -> tuple[LocalRun, str]:
    """Let a run go to its end in good order; return it, for what it left in its folder, and its output."""
    async with LocalRun(config, folder, settings) as run:
        code, output = await run.ended(seconds)
    assert code == 0, output
    return run, output


def descendants(pid: int) -> list[tuple[psutil.Process, list[str]]]:
    """Return the processes that process ``pid`` and those below it have started, each with its command line.

    One that ends meanwhile is left out.
    """
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((one, one.cmdline()))
    return found


def gone(pid: int) -> bool:
    """Say whether process ``pid`` has ended, waited for or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
