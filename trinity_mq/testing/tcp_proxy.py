"""A TCP proxy that injects real network faults: it resets connections, refuses new connections and delays replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

CHUNK = 65536


class FaultProxy:
    """A proxy between a server and its clients, on loopback.

    Args:
        url: URL of the server, with host and port.
    """

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._pairs: dict[int, tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}
        """Both sides of each connection, by the client's port."""
        self._serving: set[asyncio.Task[None]] = set()
        self._refusing = False
        self.refuses: Callable[[int], bool] = lambda _port: False
        """Returns whether a new connection from a client's port is reset."""
        self._replies = asyncio.Event()
        self._replies.set()
        self._requests = asyncio.Event()
        self._requests.set()
        self.port = 0

    @property
    def url(self) -> str:
        """The server's URL through this proxy."""
        credentials = self._target.netloc.rpartition("@")[0]
        return self._target._replace(netloc=f"{credentials}@127.0.0.1:{self.port}").geturl()

    @property
    def clients(self) -> tuple[int, ...]:
        """Ports of the clients that are connected now."""
        return tuple(self._pairs)

    def cut(self) -> None:
        """Reset both sides of every connection now, and stop holding data."""
        self.cut_clients(self.clients)
        self._replies.set()
        self._requests.set()

    def cut_clients(self, ports: Collection[int]) -> int:
        """Reset both sides of the connections of clients on these ports now; return the number of connections."""
        pairs = [pair for port in ports if (pair := self._pairs.get(port))]
        for writer in (writer for pair in pairs for writer in pair):
            writer.transport.abort()
        return len(pairs)

    def refuse(self) -> None:
        """Reset every connection now, and every new connection until :meth:`accept`."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Accept new connections."""
        self._refusing = False

    def hold_replies(self) -> None:
        """Hold all data from the server until the next :meth:`cut`."""
        self._replies.clear()

    def hold_requests(self) -> None:
        """Hold all data from the client until the next :meth:`cut`."""
        self._requests.clear()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        port = writer.get_extra_info("peername")[1]
        if self._is_refused(port):
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:  # the server is unreachable: the client sees a reset, as without the proxy
            writer.transport.abort()
            return
        pair = (writer, upstream_writer)
        if self._is_refused(port):  # refusing began while the upstream connection was opening
            for side in pair:
                side.transport.abort()
            return
        self._pairs[port] = pair
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, upstream_writer, self._requests))
                pumps.create_task(self._pump(upstream_reader, writer, self._replies))
        finally:
            self._pairs.pop(port, None)
            for side in pair:
                side.transport.abort()

    def _is_refused(self, port: int) -> bool:
        return self._refusing or self.refuses(port)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await gate.wait()
                target.write(data)
                await target.drain()
        if not target.is_closing():
            with contextlib.suppress(OSError):
                target.write_eof()
