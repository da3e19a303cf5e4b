"""Base class of the brokers that the project starts on this machine."""

from __future__ import annotations

import asyncio
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import structlog

from trinity_mq.local_broker.node_files import POLL_SECONDS, FolderLock, NodeError, NodeState
from trinity_mq.local_broker.ports import LOOPBACK, speaks_amqp

log = structlog.get_logger(__name__)

ELECT = (
    "[(catch ra:trigger_election(amqqueue:get_pid(Q))) || Q <- rabbit_amqqueue:list(), "
    "amqqueue:get_type(Q) =:= rabbit_quorum_queue], ok."
)
"""Erlang expression that triggers an election in every quorum queue of the node; queues with a leader keep working.
``catch`` protects the other queues if an agent deletes one of them at the same time."""
READY_TIMEOUT = 180.0


class NodeOptions(TypedDict, total=False):
    """Optional arguments of every local broker."""

    name: str
    """First part of the node's name; default ``tmq``."""
    port: int | None
    """Fixed AMQP port; None: a free port."""
    user: str
    """Name of the broker's only user; default ``tmq``."""
    password: str | None
    """Password; None: a random password, stored in the node's folder."""
    plugins: Sequence[str]
    """Names of RabbitMQ plugins to enable."""
    config: str
    """Additional lines for ``rabbitmq.conf``."""


class LocalNode(ABC):
    """RabbitMQ server on loopback. Its folder stores ports and password for the next start.

    Args:
        base: The folder; created with mode 0700. Use a short path on a local disk.
        options: See :class:`NodeOptions`.
    """

    def __init__(self, base: Path, **options: Unpack[NodeOptions]) -> None:
        self.base = base.absolute()
        self.plugins, self.config = tuple(options.get("plugins", ())), options.get("config", "")
        self._name, self._port = options.get("name", "tmq"), options.get("port")
        self._user, self._password = options.get("user", "tmq"), options.get("password")
        self._lock = FolderLock(self.base / "lock")
        self._process: subprocess.Popen[bytes] | None = None
        """The server, or the guard of a container, which ends with the container."""
        self._state: NodeState | None = None
        self._recovers = False
        """True if the node starts on data of an earlier start and is not ready yet."""

    @property
    def url(self) -> str:
        """``amqp://user:password@host:port/vhost``. Available after the start."""
        state = self._known_state()
        return f"amqp://{state.user}:{state.password}@{LOOPBACK}:{state.ports['amqp']}/%2F"

    @property
    def ports(self) -> dict[str, int]:
        """Ports by purpose; the broker's own port is ``amqp``. Available after the start."""
        return dict(self._known_state().ports)

    def attach(self) -> None:
        """Load the state of a private node that another process started in this folder, so that its URL, ports and
        ``rabbitmqctl`` can be used. The state of a container is in another file and is not loaded.

        Raises:
            NodeError: No private node was ever started in this folder, or its state cannot be read.
        """
        file = self.base / "node.json"
        if not file.exists():
            raise NodeError(f"no broker was ever started in {self.base}")
        self._state = NodeState.load(file, self._user, self._password)

    @property
    def pid(self) -> int | None:
        """Process id of the server, or of the guard of a container; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Launch the server; :meth:`wait_ready` waits until it is usable.

        Raises:
            NodeError: The server cannot run here, or the folder or the port is in use.
        """
        if self._process is not None and self.pid is None:
            await self.kill()  # removes the remains of a server that died
        self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._lock.take()
        try:
            await self._launch_server()
        except BaseException:
            await self.kill()
            raise

    @abstractmethod
    async def _launch_server(self) -> None:
        """Start the server in the locked folder."""

    async def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Return when the broker accepts connections; ``timeout`` in seconds.

        Raises:
            NodeError: The server died or was not ready in time; the message contains the end of its log.
        """
        port = self._known_state().ports["amqp"]
        try:
            async with asyncio.timeout(timeout):
                while not await speaks_amqp(port):
                    if self.pid is None:
                        raise NodeError(await self._failure())
                    await asyncio.sleep(POLL_SECONDS)  # a listener that opens does not send a signal
                if self._recovers:
                    await self._elect()
        except TimeoutError:
            raise NodeError(f"not ready in {timeout:g} s: {await self._failure()}") from None

    @abstractmethod
    async def stop(self) -> None:
        """Stop cleanly, so that all data is on disk. Kill processes that do not stop in time."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill all processes at once, as in a crash. The data stays."""

    @abstractmethod
    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node and return its output. A call takes 0.5 to 1 s.

        Raises:
            NodeError: The command failed; the message contains its output.
        """

    async def launch(self) -> None:
        """Start the server and wait until it is ready. If this fails, all its processes are killed.
        Raises NodeError.
        """
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.kill()
            raise

    async def __aenter__(self) -> Self:
        """Launch the broker."""
        await self.launch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the broker."""
        await self.stop()

    async def _elect(self) -> None:
        """Trigger an election in every quorum queue.

        A queue that was declared just before a crash may lack its log after the restart (seen on 3.10 and 4.0).
        RabbitMQ then treats it as a new queue, waits for an election that is never triggered, and does not answer
        requests.
        """
        try:
            await self.ctl("eval", ELECT)
        except NodeError as error:
            log.warning("election_failed", node=str(self.base), reason=str(error))
        self._recovers = False

    @abstractmethod
    async def _failure(self) -> str:
        """Return why the server is not ready, with the end of its log."""

    def _known_state(self) -> NodeState:
        if self._state is None:
            raise NodeError(f"the broker in {self.base} was not started")
        return self._state
