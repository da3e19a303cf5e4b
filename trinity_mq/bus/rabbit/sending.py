"""Frames of one turn of the event loop go to the socket with one call: each call costs more than what it carries."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

from aiormq import TransportFactory
from aiormq.connection import Connection
from aiormq.exceptions import AMQPConnectionError

if TYPE_CHECKING:
    from yarl import URL

PLACES = Connection.FRAME_BUFFER_SIZE - 2
"""Publishes that the client takes in one turn without holding its channel's lock for the next."""


class GatheringWriter(asyncio.StreamWriter):
    """Keeps what is written until the turn of the event loop is over."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._call_soon = loop.call_soon
        self._gathered: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` soon, behind what was written before."""
        if not self._gathered:
            self._call_soon(self.flush)
        self._gathered.append(data)

    def writelines(self, data: Iterable[bytes | bytearray | memoryview]) -> None:
        """As :meth:`write`, for several."""
        for each in data:
            self.write(each)

    def flush(self) -> None:
        """Send what is gathered now."""
        gathered, self._gathered = self._gathered, []
        if gathered:
            super().write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    async def drain(self) -> None:
        """Send what is gathered, and return when the transport has room again."""
        self.flush()
        await super().drain()

    def write_eof(self) -> None:
        """Send what is gathered, and then the end."""
        self.flush()
        super().write_eof()

    def close(self) -> None:
        """Send what is gathered, then close."""
        self.flush()
        super().close()


class FirstBytes(asyncio.StreamReader):
    """Remembers how the answer began: who does not speak our protocol says there what it speaks."""

    first = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """Take what has arrived."""
        if not self.first:
            self.first = bytes(data)[:8]
        super().feed_data(data)


class GatheringTransport(TransportFactory):
    """Connects the AMQP client through a :class:`GatheringWriter`.

    Args:
        context: For ``amqps``; None: no TLS.
        server_name: What the certificate must be for, None: the host.
    """

    def __init__(self, context: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        self._context, self._server_name = context, server_name
        self._reader: FirstBytes | None = None

    @property
    def first(self) -> bytes:
        """How the answer began."""
        return self._reader.first if self._reader is not None else b""

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect.

        Raises:
            AMQPConnectionError: Nobody there, or its certificate is not in order.
        """
        secure = url.scheme == "amqps"
        if secure and self._context is None:
            raise ValueError("amqps needs an SSL context")
        host, port = url.host or "localhost", url.port or (5671 if secure else 5672)
        loop = asyncio.get_running_loop()
        reader = self._reader = FirstBytes(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        tls: dict[str, Any] = {"ssl": self._context, "server_hostname": self._server_name or host} if secure else {}
        try:
            transport, _ = await loop.create_connection(lambda: protocol, host, port, **tls)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, GatheringWriter(transport, protocol, reader, loop)


class Places:
    """Lets so many through in one turn of the event loop, and the others in order in the turns that follow."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = self._free = places
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def take(self) -> None:
        """Return when there is a place in this turn; without a pause where there is one now and nobody waits."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        if self._free:
            self._free -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._free = self._places
        while self._waiting and self._free:
            place = self._waiting.popleft()
            if not place.done():
                self._free -= 1
                place.set_result(None)
        self._turning = self._free < self._places
        if self._turning:
            loop.call_soon(self._turn, loop)
