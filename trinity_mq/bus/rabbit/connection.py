"""AMQP connections, and the translation of the client's errors into the few errors that decide on a retry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex
from urllib.parse import unquote, urlsplit

from aiormq.abc import AbstractConnection
from aiormq.channel import Channel
from aiormq.connection import Connection, FrameReceiver, TransportFactory
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionClosed,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from trinity_mq.bus.addresses import address, in_turn
from trinity_mq.bus.base import BusRefused, QueueGone
from trinity_mq.bus.rabbit.content_headers import TolerantReceiver
from trinity_mq.bus.tls import answers_with_tls, tls_context, tls_problem

if TYPE_CHECKING:
    from trinity_mq.config.bus import TlsConfig

CONNECT_TIMEOUT = 10.0
"""Seconds for one attempt to connect. A host that drops packets never refuses a connection."""
CLOSE_TIMEOUT = 5.0

for _name in ("aiormq", "aio_pika"):
    if logging.getLogger(_name).level == logging.NOTSET:
        # this module reports lost connections itself in a line; the clients' logs include tracebacks
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class BrokerConnectError(Exception):
    """The connection or channel was lost, or the broker is not ready for this queue. A retry may succeed."""


class Locked(BusRefused):
    """The exclusive queue belongs to another connection."""


class OwnQueueLost(BrokerConnectError):
    """An exclusive queue of this bus is gone although its connection is alive. It must be declared again."""


class InequivalentError(BrokerConnectError):
    """The queue exists with other arguments."""


@contextlib.contextmanager
def amqp_errors() -> Iterator[None]:
    """Translate errors of the AMQP client into BrokerConnectError or its subclasses, QueueGone, Locked or BusRefused.

    A cancellation that the client swallowed is raised nevertheless. Before Python 3.12, ``asyncio.wait_for``, which the
    client uses, returns normally if its result arrives at the moment of the cancellation. A loop would then run
    forever.
    """
    earlier_cancellations = _cancellations()
    try:
        with _translated():
            yield
    except asyncio.CancelledError as error:
        if _cancellations() > earlier_cancellations:
            raise
        # the client cancels the futures of a dead connection although nobody cancelled this task
        raise BrokerConnectError("connection lost") from error
    except (BrokerConnectError, BusRefused, QueueGone) as error:
        if _cancellations() > earlier_cancellations:
            raise asyncio.CancelledError from error
        raise
    if _cancellations() > earlier_cancellations:
        raise asyncio.CancelledError


def _cancellations() -> int:
    """Return the number of pending cancellations of the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ChannelNotFoundEntity as error:
        # right after a restart a durable queue is "down or inaccessible", which is also a not-found error, but the
        # queue exists
        if "no queue" in str(error):
            raise QueueGone(str(error)) from error
        raise BrokerConnectError(str(error)) from error
    except ChannelLockedResource as error:
        raise Locked(str(error)) from error
    except ChannelPreconditionFailed as error:
        raise InequivalentError(str(error)) from error
    except ChannelAccessRefused as error:
        raise BusRefused(refused_access(str(error))) from error
    except (AMQPError, ChannelInvalidStateError, OSError) as error:
        raise BrokerConnectError(str(error) or type(error).__name__) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # if we close the connection, the client fails its pending futures with a bare Exception
        raise BrokerConnectError("connection closed") from error


class _FirstBytesReader(asyncio.StreamReader):
    """Stream reader that stores the first received bytes. They identify a server that speaks another protocol."""

    first = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        if not self.first:
            self.first = bytes(data)[:8]
        super().feed_data(data)


class _SocketFactory(TransportFactory):
    """Opens the client's sockets with the configured TLS context, and with the configured server name if it differs
    from the host of the URL.
    """

    def __init__(self, context: ssl.SSLContext | None, server_name: str | None) -> None:
        self._context, self._server_name = context, server_name
        self._reader: _FirstBytesReader | None = None

    @property
    def first(self) -> bytes:
        return self._reader.first if self._reader is not None else b""

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port, loop = url.host or "localhost", url.port or 5672, asyncio.get_running_loop()
        reader = self._reader = _FirstBytesReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        tls: dict[str, Any] = {}
        if self._context is not None:
            tls = {"ssl": self._context, "server_hostname": self._server_name or host}
        try:
            transport, _ = await loop.create_connection(lambda: protocol, host, port, **tls)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        # reads the TLS alert of a server that refuses our certificate, because a write could reset it
        await asyncio.sleep(0)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _BufferedConnection(Connection):
    """AMQP connection whose buffer holds the frames of many publishes.

    A publish that waits for buffer space holds the lock of the channel, which serialises the other publishes. This
    class also reads messages with properties that the client cannot decode.
    """

    FRAME_BUFFER_SIZE = 1024

    async def _Connection__reader(self, receiver: FrameReceiver) -> None:  # noqa: N802  # the client's private reader
        client: Any = super()
        await client._Connection__reader(TolerantReceiver(receiver.reader))  # noqa: SLF001


class BrokerConnection:
    """An open connection to the broker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(
        cls, url: str, name: str, heartbeat: float, on_lost: Callable[[str], None], tls: TlsConfig | None = None
    ) -> BrokerConnection:
        """Connect. ``on_lost`` is called with the reason when the connection is lost.

        Raises:
            AddressError: A file for TLS cannot be used.
            BusRefused: Wrong password or virtual host, or a TLS connection that is not trusted or does not match the
                broker.
            BrokerConnectError: The broker is currently unreachable.
        """
        secure = urlsplit(url).scheme == "amqps"
        context = await tls_context(tls) if secure else None
        transports = _SocketFactory(context, tls.server_name if tls is not None else None)
        connection = _BufferedConnection(
            URL(url).update_query(heartbeat=round(heartbeat)),
            transport_factory=transports,
            client_properties={"connection_name": name},
        )
        with amqp_errors():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await connection.connect()
            except (ProbableAuthenticationError, AuthenticationError) as error:
                raise BusRefused(_refused_login(url)) from error
            except (AMQPError, OSError) as error:
                refusal = _refusal(error, url, tls, transports.first)
                if refusal is None:
                    raise
                raise refusal from error

        def lost(closing: asyncio.Future[object]) -> None:
            _drain(connection)
            on_lost(_reason(closing))

        connection.closing.add_done_callback(lost)
        return cls(connection)

    @property
    def alive(self) -> bool:
        return not self._connection.is_closed

    @property
    def version(self) -> str:
        return str(self.server_properties.get("version", "unknown"))

    @property
    def server_properties(self) -> Mapping[str, Any]:
        """Properties that the broker sent on connect: product, version, capabilities."""
        return self._connection.server_properties

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel. With ``confirms``, a returned message raises PublishError.

        The prefetch of the consumer bounds the frames of the channel, not the client. The client would stop reading the
        whole connection while ten frames of a channel wait. If nobody reads that channel any more, as between closing
        it and the broker's answer, the client would never resume.
        """
        with amqp_errors():
            if self._connection.is_closed:
                raise BrokerConnectError("connection lost")
            channel = await self._connection.channel(
                publisher_confirms=confirms, frame_buffer_size=0, on_return_raises=True
            )
        if not isinstance(channel, Channel):
            raise TypeError(f"the AMQP client made a {type(channel).__name__}, wanted {Channel.__name__}")
        return channel

    async def unblocked(self) -> None:
        """Return once the broker does not block this connection. After the connection is lost, this call never
        returns.
        """
        await self._connection.ready()

    async def close(self) -> None:
        """Close the connection. A broker that does not answer is waited for at most five seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._connection.close(ConnectionClosed)


async def open_connection(
    urls: tuple[str, ...], tls: TlsConfig | None, name: str, heartbeat: float, on_lost: Callable[[str], None]
) -> BrokerConnection:
    """Connect to the first node of the broker that accepts, in rotation from a random node.

    Raises:
        AddressError: A file for TLS cannot be used.
        BusRefused: All nodes refuse.
        BrokerConnectError: No node accepts now, and at least one of them may accept later.
    """
    failed: dict[str, BrokerConnectError | BusRefused] = {}
    for url in in_turn(urls):
        try:
            return await BrokerConnection.open(url, name, heartbeat, on_lost, tls)
        except (BrokerConnectError, BusRefused) as error:
            failed[url] = error
    if len(failed) == 1:
        raise next(iter(failed.values()))
    reasons = "; ".join(f"{address(url)}: {failed[url]}" for url in urls)
    if all(isinstance(error, BusRefused) for error in failed.values()):
        raise BusRefused(reasons)
    raise BrokerConnectError(reasons)


def _refusal(error: Exception, url: str, tls: TlsConfig | None, first: bytes) -> BusRefused | None:
    """Return the error to raise if a retry cannot succeed. Return None if a retry may succeed."""
    where, host = address(url), urlsplit(url).hostname or ""
    server = tls.server_name if tls is not None and tls.server_name else host
    if (problem := tls_problem(error, where, server, tls)) is not None:
        return BusRefused(problem)
    if urlsplit(url).scheme == "amqp" and answers_with_tls(first):
        return BusRefused(f"the broker at {where} speaks TLS, but broker.url begins with amqp: write amqps://")
    if isinstance(error, InvalidFrameError):
        return BusRefused(_refused_vhost(url))
    return None


def refused_access(broker_reason: str) -> str:
    """Return an error message with the broker's reason for refusing an operation, and advice."""
    name = re.search(r"'tmq\.([a-z0-9-]{1,40})\.", broker_reason)
    run = name.group(1) if name is not None else "RUN"
    return (
        f"the broker refuses it: {broker_reason}; `trinity-mq broker permissions {run}` says what each kind of user "
        "needs"
    )


def _drain(transport: AbstractConnection) -> None:
    """Empty the write queue of a dead connection until no task adds frames. A full queue would block tasks forever."""
    if transport.write_queue.empty():
        return
    while not transport.write_queue.empty():
        transport.write_queue.get_nowait()
    asyncio.get_running_loop().call_soon(_drain, transport)


def _reason(closing: asyncio.Future[object]) -> str:
    error = asyncio.CancelledError() if closing.cancelled() else closing.exception()
    return str(error) or "connection lost" if error is not None else "connection closed"


def _refused_login(url: str) -> str:
    user = unquote(urlsplit(url).username or "guest")
    return (
        f"the broker at {address(url)} refuses user {user!r}: wrong user name or password; "
        "set them in broker.url or TRINITY_MQ_BROKER_URL (amqp://user:password@host:port/vhost)"
    )


def _refused_vhost(url: str) -> str:
    parts = urlsplit(url)
    vhost, user = unquote(parts.path[1:]) or "/", unquote(parts.username or "guest")
    return (
        f"the broker at {address(url)} does not open virtual host {vhost!r} (the last part of broker.url) to user "
        f"{user!r}: it does not exist, or the user has no permission on it; see `rabbitmqctl list_vhosts` and "
        "`rabbitmqctl list_permissions`"
    )
