"""What runs beside an agent in its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
import sys

from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.runtime import serve
from trinity_mq.runtime.agent import Agent

role, run_dir = sys.argv[1:]
begun = []


async def give_back():
    begun.append("gives back")


class Worker(Agent):
    async def serve(self):
        print(*begun or ["keeps"])


def build(bus, topology):
    memory = MemoryBus(MemoryBroker(), topology, config=config.broker)
    return Worker(config, bus=memory, topology=topology, agent_id=f"{role}-0")


Worker.role = role
serve.trim_memory_periodically = give_back
broker = {"url": "amqp://guest:guest@127.0.0.1:1/"}  # its bus is another one
config = load_config({"name": "w", "model": {"tiny": {}}, "run_dir": run_dir, "broker": broker})
sys.exit(serve.run_daemon(config, f"{role}-0", role, build))
"""


@pytest.mark.parametrize(("role", "does"), [("runner", "gives back\n"), ("trainer", "keeps\n")])
def test_all_but_trainers_give_freed_memory_back(tmp_path: Path, role: str, does: str) -> None:
    argv = [sys.executable, "-c", AGENT, role, str(tmp_path)]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)
    assert (found.returncode, found.stdout) == (0, does), found.stderr
