"""Three private nodes that make one cluster, any of which may be killed, frozen or started again."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import until
from trinity_mq.local_broker.node import ClusterMembership, PrivateNode, epmd_command
from trinity_mq.local_broker.ports import LOOPBACK, accepts_connections, free_ports

COUNT = 3
SETTINGS = """
cluster_formation.peer_discovery_backend = classic_config
cluster_partition_handling = pause_minority
net_ticktime = 8
"""
"""The last: seconds until a node that does not answer counts as down. Until then the exclusive queues of its
connections are held, an explorer's and a trainer's lock among them."""
FORMED = 60.0
"""Seconds that a cluster may take until its nodes know one another."""


class PrivateCluster:
    """Nodes of one cluster, with one epmd that outlives each of them.

    Args:
        base: A folder for all of them.
        count: How many.
    """

    def __init__(self, base: Path, *, count: int = COUNT) -> None:
        self._base = base
        self._epmd_port = free_ports(1)[0]
        self._epmd: subprocess.Popen[bytes] | None = None
        cluster = ClusterMembership(cookie=secrets.token_hex(16), epmd_port=self._epmd_port)
        names = [f"n{number}" for number in range(1, count + 1)]
        peers = [f"cluster_formation.classic_config.nodes.{name[1:]} = {name}@localhost" for name in names]
        config, password = SETTINGS + "\n".join(peers), secrets.token_hex(16)
        self.nodes = {
            name: PrivateNode(base / name, name=name, password=password, config=config, cluster=cluster)
            for name in names
        }
        self._frozen: set[str] = set()
        self.tell: Callable[[str], None] = print
        """Called with each act of violence."""

    @property
    def url(self) -> str:
        """The addresses of all nodes."""
        return ",".join(node.url for node in self.nodes.values())

    async def start(self) -> None:
        """Start all at once, and see that they have become one."""
        self._base.mkdir(parents=True, exist_ok=True)
        self._start_epmd()
        await until(lambda: accepts_connections(self._epmd_port))
        for node in self.nodes.values():
            await node.start()
        await asyncio.gather(*(node.wait_ready() for node in self.nodes.values()))
        await self.all_run()

    async def kill(self) -> None:
        """End everything."""
        await asyncio.gather(*(node.kill() for node in self.nodes.values()))
        if self._epmd is not None:
            self._epmd.kill()
            await asyncio.to_thread(self._epmd.wait)
            self._epmd = None

    async def __aenter__(self) -> Self:
        """Start."""
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        await self.kill()

    # -- what it knows, asked of a node that can answer

    async def all_run(self) -> None:
        """Return once every node sees all the others."""
        for node in self.nodes.values():
            await until(functools.partial(self._sees_all, node), FORMED)

    async def listed(self, what: str, *columns: str) -> list[dict[str, Any]]:
        """Return what ``rabbitmqctl list_<what>`` knows."""
        able = (node for name, node in self.nodes.items() if name not in self._frozen and node.pid is not None)
        found: list[dict[str, Any]] = json.loads(await next(able).ctl(f"list_{what}", *columns, "--formatter", "json"))
        return found

    # -- violence

    def crash(self, name: str) -> None:
        """SIGKILL to a node's server."""
        self.tell(f"SIGKILL to node {name}")
        os.kill(self._pid(name), signal.SIGKILL)
        self._frozen.discard(name)

    def freeze(self, name: str) -> None:
        """SIGSTOP to a node's server: its connections stay open and nothing answers."""
        self.tell(f"SIGSTOP to node {name}")
        os.kill(self._pid(name), signal.SIGSTOP)
        self._frozen.add(name)

    async def restart(self, name: str) -> None:
        """Start a node that crashed, on the data it has left."""
        node = self.nodes[name]
        await until(lambda: node.pid is None)
        await node.launch()
        self.tell(f"node {name} is back")

    def _start_epmd(self) -> None:
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [*guard, *epmd_command("-port", str(self._epmd_port), "-address", LOOPBACK)]
        self._epmd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def _sees_all(self, node: PrivateNode) -> bool:
        status = json.loads(await node.ctl("cluster_status", "--formatter", "json"))
        return len(status["running_nodes"]) == len(self.nodes)

    def _pid(self, name: str) -> int:
        pid = self.nodes[name].pid
        assert pid is not None, f"node {name} does not run"
        return pid
