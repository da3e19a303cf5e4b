"""A new role in two files, its agent module and its row: launched, shown and ended as a built-in role."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trinity_agents
import trinity_mq

ROW = """
        "auditor": RoleRow(
            "counts batches", ("both",), number="trainer.nproc", hears=("explorer",), told_of_end=True, flow=6, shown=6
        ),
"""
AGENT = """
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.serve import run_daemon

class Auditor(Agent):
    role = "auditor"

    async def serve(self):
        self.set_state("working", "the end of the run")
        await self.woken.until(lambda: self.draining.is_set() or self.peers.explorer.finished)

def main(config, agent_id="auditor-0"):
    return run_daemon(config, agent_id, "auditor", lambda bus, topology: Auditor(
        config, bus=bus, topology=topology, agent_id=agent_id
    ))
"""
SCRIPT = """
import asyncio, pathlib, re
from trinity_agents.auditor.agent import Auditor
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.permissions import permissions
from trinity_mq.config import load_config
from trinity_mq.launch.session import agents
from trinity_mq.messages import ExplorerStatus, Heartbeat
from trinity_mq.observability.follow import follow_telemetry
from trinity_mq.observability.run_state import RunState
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import heartbeat_patterns
from trinity_mq.testing.virtual_time import run_virtually

config = load_config({"name": "w", "model": {"tiny": {}}, "monitor": {"tensorboard": False}})
topology = Topology("w")
specs = {spec.name: spec.argv[3:] for spec in agents(config, pathlib.Path("c.yaml"), None)}
assert list(specs)[-2:] == ["runner-1", "auditor-0"], specs
assert specs["auditor-0"] == ("auditor", "c.yaml", "--id", "auditor-0"), specs
queue = topology.listener("auditor-0", "x", "telemetry", *heartbeat_patterns("auditor"))
granted = permissions("w", "agent")
assert all(re.match(pattern, queue.name) for pattern in (granted.configure, granted.write, granted.read))

async def script():
    broker, view, changed = MemoryBroker(), RunState("w", 1), Notifier()
    bus = MemoryBus(broker, topology, config=config.broker)
    await bus.connect()
    await bus.declare(*topology.durable)
    now = asyncio.get_running_loop().time
    rows = lambda: {row.id: row.state for row in view.agents(now())}

    def take(message):
        view.receive(message, now())
        changed.notify()

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(follow_telemetry(bus, topology, "status", take))
        auditor = Auditor(config, bus=MemoryBus(broker, topology, config=config.broker), topology=topology,
            agent_id="auditor-0")
        serving = group.create_task(auditor.run())
        await changed.until(lambda: rows().get("auditor-0") == "working")
        end = Heartbeat(id="explorer-0", role="explorer", incarnation="e", host="h", pid=1, seq=1, state="finished",
            lease=10.0, detail=ExplorerStatus(finished=True))
        await bus.publish(topology.exchange("telemetry"), "beat.explorer.explorer-0", envelope(end))
        await serving
        await changed.until(lambda: rows()["auditor-0"] == "finished")
        watching.cancel()

run_virtually(script())
print("ok")
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The library with the two files of the role; everything else is linked."""
    for package in (trinity_mq, trinity_agents):
        source, copy = Path(str(package.__file__)).parent, tmp_path / package.__name__
        copy.mkdir()
        for entry in source.iterdir():
            (copy / entry.name).symlink_to(entry)
    table = tmp_path / "trinity_mq" / "roles.py"
    text = table.read_text()
    table.unlink()
    assert text.count('"gateway", "supervisor"]') == text.count('        "scheduler": RoleRow(') == 1
    text = text.replace('"gateway", "supervisor"]', '"gateway", "supervisor", "auditor"]')
    table.write_text(text.replace('        "scheduler": RoleRow(', f'{ROW}        "scheduler": RoleRow('))
    (tmp_path / "trinity_agents" / "auditor").mkdir()
    (tmp_path / "trinity_agents" / "auditor" / "agent.py").write_text(AGENT)
    return tmp_path


def python(library: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(library)}
    done = subprocess.run(
        [sys.executable, *words], cwd=library, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_role_is_its_agent_module_and_its_row(library: Path) -> None:
    assert python(library, "-c", SCRIPT) == "ok\n"
    assert "run one auditor by itself: counts batches" in " ".join(
        python(library, "-m", "trinity_mq.cli.main", "--help").split()
    )
    assert "auditor-0" in python(library, "-m", "trinity_mq.cli.main", "auditor", "--help")
