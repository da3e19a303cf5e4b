"""A run as a child process: its output is read while it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

PROGRAM = """
import pathlib, sys, time
print("x" * 400_000, flush=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
"""Prints more than a pipe holds, creates a file, and waits."""


async def test_a_run_that_prints_much_does_not_block_and_its_output_is_kept(tmp_path: Path) -> None:
    written = tmp_path / "written"
    run = LocalRun(Path("none.yaml"), tmp_path)
    run._command = [sys.executable, "-c", PROGRAM, str(written)]
    async with run:
        await run.until(written.exists, 20.0)
        with pytest.raises(TimeoutError):
            await run.ended(0.01)
        assert run.process is not None
        run.process.terminate()
        _, output = await run.ended(20.0)
    assert output == "x" * 400_000 + "\n"
