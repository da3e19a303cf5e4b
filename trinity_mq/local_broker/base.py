"""What every broker that we start ourselves has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from trinity_mq.local_broker.node_files import FolderLock, NodeError, NodeState
from trinity_mq.local_broker.ports import LOOPBACK

log = structlog.get_logger(__name__)

ELECT = (
    "[ra:trigger_election(amqqueue:get_pid(Q)) || Q <- rabbit_amqqueue:list(), "
    "amqqueue:get_type(Q) =:= rabbit_quorum_queue], ok."
)
"""Has every quorum queue of the node hold an election; where there is a leader, that changes nothing that lasts."""


class LocalNode(ABC):
    """A RabbitMQ of our own on loopback, whose folder keeps what the next start needs to find its data again.

    Args:
        base: The folder; made with mode 0700. Keep it short and on a local disk.
        name: First part of the node's name.
        port: Fixed AMQP port, None for a free one.
        user: Name of the broker's only user.
        password: None for a random one, kept in ``base``.
        plugins: Names of RabbitMQ plugins to enable.
        config: Further lines for ``rabbitmq.conf``.
    """

    def __init__(
        self,
        base: Path,
        *,
        name: str = "tmq",
        port: int | None = None,
        user: str = "tmq",
        password: str | None = None,
        plugins: Sequence[str] = (),
        config: str = "",
    ) -> None:
        self.base = base.absolute()
        self.plugins, self.config = tuple(plugins), config
        self._name, self._port, self._user, self._password = name, port, user, password
        self._lock = FolderLock(self.base / "lock")
        self._state: NodeState | None = None
        self._recovers = False
        """It starts with data of an earlier life, and has not been ready since."""

    @property
    def url(self) -> str:
        """``amqp://user:password@host:port/vhost``. Only once started."""
        state = self._known_state()
        return f"amqp://{state.user}:{state.password}@{LOOPBACK}:{state.ports['amqp']}/%2F"

    @property
    def ports(self) -> dict[str, int]:
        """Ports by use, the broker's own as ``amqp``. Only once started."""
        return dict(self._known_state().ports)

    def attach(self) -> None:
        """Know the node that another process has started in this folder: its URL, its ports and its tools.

        Raises:
            NodeError: None was ever started in it.
        """
        file = self.base / "node.json"
        if not file.exists():
            raise NodeError(f"no broker was ever started in {self.base}")
        self._state = NodeState.load(file, self._user, self._password)

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The server's process id, None when it does not run."""

    @abstractmethod
    async def start(self) -> None:
        """Launch the server; :meth:`wait_ready` tells when it can be used.

        Raises:
            NodeError: It cannot be run here, or the folder or the port is in use.
        """

    @abstractmethod
    async def wait_ready(self, timeout: float = 120.0) -> None:
        """Return when the broker accepts connections.

        Raises:
            NodeError: The server died or was not ready in time; says what its log says.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop cleanly, so that everything is on disk; kill what does not stop in time."""

    @abstractmethod
    async def kill(self) -> None:
        """End at once all that was started: a crash. The data stays."""

    @abstractmethod
    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node and return what it prints (0.5 to 1 s a call).

        Raises:
            NodeError: It failed; carries its output.
        """

    async def launch(self) -> None:
        """Start and wait until ready; nothing is left behind when that fails. Raises NodeError."""
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.kill()
            raise

    async def __aenter__(self) -> Self:
        """Launch."""
        await self.launch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def _elect(self) -> None:
        """See to it that every quorum queue has a leader again. One that was declared just before a crash may come back
        without its log (seen on 3.10 and 4.0); RabbitMQ takes it for a new one, whose election others will call, and
        from then on it answers nobody.
        """
        try:
            await self.ctl("eval", ELECT)
        except NodeError as error:
            log.warning("no_election", node=str(self.base), reason=str(error))
        self._recovers = False

    def _known_state(self) -> NodeState:
        if self._state is None:
            raise NodeError(f"the broker in {self.base} was not started")
        return self._state
