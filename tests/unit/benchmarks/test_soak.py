"""What the soak samples: each process of a run, forked agents too."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
FORKED = """
import os, setproctitle, sys
setproctitle.setproctitle(" ".join(sys.argv[1:]))
os.write(1, b"up\\n")
sys.stdin.read()
"""
SUPERVISOR = """
import subprocess, sys
words = sys.argv[2:]
started = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], *words, "--id", name], stdin=sys.stdin, stdout=sys.stdout)
    for name in ("trainer-0", "runner-0")
]
for one in started:
    one.wait()
"""


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    """Return the module; as a script it imports what lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("benchmarks.soak")


async def test_agents_whose_command_line_is_one_text_are_found(soak: ModuleType, tmp_path: Path) -> None:
    """The soak asks for nothing but the supervisor's process, and for the pids of agents that it does not know."""
    words = ("python", "-m", "trinity_mq.cli.main", "agent", str(tmp_path / "config.yaml"))
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISOR, FORKED, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    run: Any = SimpleNamespace(process=supervisor, pid=lambda agent: None)
    try:
        for _ in range(2):
            assert await supervisor.stdout.readline() == b"up\n"
        found = soak.processes_of(run, tmp_path)
        assert set(found) == {"supervisor", "engine", "trainer-0", "runner-0"}
        assert len({found["trainer-0"], found["runner-0"], supervisor.pid}) == 3
        assert set(soak.processes_of(run, tmp_path / "other")) == {"supervisor", "engine"}, "agents of another run"
    finally:
        supervisor.stdin.close()
        await supervisor.wait()


def test_memory_is_that_of_anonymous_pages_and_a_process_without_samples_is_said(soak: ModuleType) -> None:
    rollup = "556-7ff ---p [rollup]\nRss: 194609 kB\n"
    assert soak.anonymous_memory(f"{rollup}Pss_Anon: 1024 kB\nAnonymous:   2048 kB\n") == 2.0
    with pytest.raises(ValueError, match=r"Linux 4\.14"):
        soak.anonymous_memory(rollup)
    watch = soak.Watch("run")
    watch.note_memory({"this": os.getpid(), "gone": 2**22 + 1, "not known": None})
    assert set(watch.samples) == {"memory/this"}
    assert 1.0 < watch.samples["memory/this"][0][1] < psutil.Process().memory_info().rss / 2**20
    for _ in range(20):
        watch.note("memory/supervisor", 50.0)
    said = "the memory of engine was sampled 0 times, that of the supervisor 20 times"
    assert soak.unwatched(watch, ["engine", "supervisor"]) == [said]
