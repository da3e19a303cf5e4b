"""The commands of the README, as written and in their order, in a folder that holds nothing but the examples."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


def commands(section: str) -> list[str]:
    """Return the lines of the last shell block of a section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[-1].strip().splitlines()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = tmp_path / ".venv" / "bin" / "trinity-mq"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m trinity_mq.cli.main "$@"\n')
    script.chmod(0o755)
    return tmp_path


@asynccontextmanager
async def shell(line: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a line of the README; what still runs at the end is drained."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRINITY_MQ_BROKER_URL")}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'agents'}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"exec {line}", cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def said(line: str, folder: Path) -> str:
    async with shell(line, folder) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, f"{line}\n{out.decode()}\n{err.decode()}"
    return out.decode()


@pytest.mark.extended
async def test_a_first_run_and_what_is_there_to_see_of_it(here: Path) -> None:
    """The run is named on the command line, and has finished when the other commands ask for it."""
    validate, plan, run, listing, status, why, dash, inspect, dead = commands("Your own run")
    assert "is valid" in await said(validate, here)
    assert "trainer" in await said(plan, here)
    assert "run my-first-run: 40 steps" in await said(run, here)
    assert re.search(r"^my-first-run +finished +40/40 ", await said(listing, here), re.MULTILINE)
    assert "this run has finished" in await said(status, here)
    assert "this run has finished" in await said(why, here)
    async with shell(dash, here) as page, asyncio.timeout(60):
        assert page.stdout is not None
        assert b"my-first-run: http://127.0.0.1:" in await page.stdout.readline()
    assert "advantage" in await said(inspect, here)
    assert "run 'my-first-run' has no dead letters" in await said(dead, here)
