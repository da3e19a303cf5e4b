"""Agents whose supervisor is killed: they end by themselves, in good order where they can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trinity_mq.runtime.process import wait_exit

LEASE = 2.0
AGENT = f"""
import asyncio, sys, time
from pathlib import Path
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.runtime import serve
from trinity_mq.runtime.agent import Agent

folder, kind, role = Path(sys.argv[1]), *sys.argv[2:]
begun = []


async def give_back():
    begun.append("gives back")


if kind == "idle":
    serve.trim_memory_periodically = give_back
serve.ORPHAN_LEASE = {LEASE}
URL = "amqp://guest:guest@127.0.0.1:1/"  # its bus is another one


class Worker(Agent):
    async def serve(self):
        if kind == "idle":
            print(*begun or ["keeps"])
            return
        (folder / "up").write_text("up")
        try:
            if kind == "orderly":
                await self.draining.wait()
                (folder / "end").write_text(f"drained within {{self.drain_timeout:g}} s")
            elif kind == "stuck":
                await asyncio.Event().wait()
            else:
                time.sleep(60)
        except asyncio.CancelledError:
            (folder / "end").write_text("cancelled")
            raise


def build(bus, topology):
    memory = MemoryBus(MemoryBroker(), topology, config=config.broker)
    return Worker(config, bus=memory, topology=topology, agent_id=f"{{role}}-0")


Worker.role = role
places = {{"run_dir": str(folder / "run"), "broker": {{"url": URL}}}}
config = load_config({{"name": "w", "model": {{"tiny": {{}}}}, **places}})
sys.exit(serve.run_daemon(config, f"{{role}}-0", role, build))
"""
SUPERVISOR = """
import os, subprocess, sys
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "TRINITY_MQ_PARENT": str(os.getpid())})
print(agent.pid, flush=True)
agent.wait()
"""


@pytest.mark.parametrize(
    ("kind", "end"), [("orderly", "drained within 0.8 s"), ("stuck", "cancelled"), ("blocked", None)]
)
async def test_an_agent_ends_within_a_lease_of_its_supervisor(tmp_path: Path, kind: str, end: str | None) -> None:
    argv = (sys.executable, "-c", SUPERVISOR, "-c", AGENT, str(tmp_path), kind, "runner")
    supervisor = await asyncio.to_thread(subprocess.Popen, argv, stdout=subprocess.PIPE, text=True)
    with supervisor:
        assert supervisor.stdout is not None
        agent = int(await asyncio.to_thread(supervisor.stdout.readline))
        async with asyncio.timeout(40):
            while not (tmp_path / "up").exists():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.05)
            supervisor.kill()
            killed = time.monotonic()
            try:
                await wait_exit(agent)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)
    assert time.monotonic() - killed < LEASE + 2.0
    assert (tmp_path / "end").exists() == (end is not None)
    assert end is None or (tmp_path / "end").read_text() == end


@pytest.mark.parametrize(("role", "does"), [("runner", "gives back\n"), ("trainer", "keeps\n")])
def test_all_but_trainers_give_freed_memory_back(tmp_path: Path, role: str, does: str) -> None:
    argv = [sys.executable, "-c", AGENT, str(tmp_path), "idle", role]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, does), done.stderr
