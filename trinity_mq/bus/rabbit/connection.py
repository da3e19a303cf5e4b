"""AMQP connections, and the translation of the client's errors into the few that decide on a retry."""

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
"""Seconds for one attempt: a host that drops packets never refuses."""
CLOSE_TIMEOUT = 5.0

for _name in ("aiormq", "aio_pika"):
    if logging.getLogger(_name).level == logging.NOTSET:
        # What it logs on a lost connection, with tracebacks, we report ourselves in one line.
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class BrokerConnectError(Exception):
    """The connection or channel was lost, or the broker is not ready for this queue: try again."""


class Locked(BusRefused):
    """The exclusive queue belongs to another connection."""


class OwnQueueLost(BrokerConnectError):
    """An exclusive queue of ours is gone, though our connection stands: to be declared again."""


class InequivalentError(BrokerConnectError):
    """The queue exists with other arguments."""


@contextlib.contextmanager
def amqp_errors() -> Iterator[None]:
    """Translate errors of the AMQP client into BrokerConnectError (or a subclass), QueueGone, Locked or BusRefused.

    A cancellation that the client swallowed is raised all the same: before Python 3.12 ``asyncio.wait_for``, which it
    uses, returns where its result comes at the moment of the cancellation, and a loop would go on for ever.
    """
    before = _cancellations()
    try:
        with _translated():
            yield
    except asyncio.CancelledError as error:
        if _cancellations() > before:
            raise
        # The client cancels the futures of a connection that died; nobody cancelled us.
        raise BrokerConnectError("connection lost") from error
    except (BrokerConnectError, BusRefused, QueueGone) as error:
        if _cancellations() > before:
            raise asyncio.CancelledError from error
        raise
    if _cancellations() > before:
        raise asyncio.CancelledError


def _cancellations() -> int:
    """Return how often the present task was cancelled and has not come to terms with it."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ChannelNotFoundEntity as error:
        # Just after a restart a durable queue is "down or inaccessible": also not found, but not gone.
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
        # Futures of a connection that we closed ourselves are rejected with a bare Exception.
        raise BrokerConnectError("connection closed") from error


class _FirstBytesReader(asyncio.StreamReader):
    """Stream reader that keeps the first bytes received: they show a server that speaks another protocol."""

    first = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        if not self.first:
            self.first = bytes(data)[:8]
        super().feed_data(data)


class _SocketFactory(TransportFactory):
    """Opens the client's sockets with our TLS context, and a server name other than the URL's host where one is set."""

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
        await asyncio.sleep(0)  # reads the alert of a server that refuses our certificate: a write could reset it
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _BufferedConnection(Connection):
    """AMQP connection with room for the frames of many publishes.

    A publish that finds no room holds the channel's lock while it waits, which makes the others go out one by one.
    It reads messages with properties that the client cannot decode.
    """

    FRAME_BUFFER_SIZE = 1024

    async def _Connection__reader(self, receiver: FrameReceiver) -> None:  # noqa: N802  # the client's private reader
        client: Any = super()
        await client._Connection__reader(TolerantReceiver(receiver.reader))  # noqa: SLF001


class BrokerConnection:
    """An open connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(
        cls, url: str, name: str, heartbeat: float, on_lost: Callable[[str], None], tls: TlsConfig | None = None
    ) -> BrokerConnection:
        """Connect; ``on_lost`` is called with the reason when the connection goes.

        Raises:
            AddressError: A file that TLS needs cannot be used.
            BusRefused: Wrong password or virtual host, or TLS where it cannot be trusted or does not fit.
            BrokerConnectError: The broker cannot be reached now.
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
        """Open a channel; with ``confirms``, a returned message raises PublishError.

        Its frames are not bounded by the client, but by the consumer's prefetch: the client would read nothing from the
        whole connection while ten frames of one channel wait, and for ever where nobody reads that channel any more,
        as between our closing it and the broker's answer.
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
        """Return once the broker does not block this connection. Never returns after the connection is lost."""
        await self._connection.ready()

    async def close(self) -> None:
        """Close; at most five seconds are spent on a broker that does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._connection.close(ConnectionClosed)


async def open_connection(
    urls: tuple[str, ...], tls: TlsConfig | None, name: str, heartbeat: float, on_lost: Callable[[str], None]
) -> BrokerConnection:
    """Connect to the first node of the broker that accepts, beginning with a random one.

    Raises:
        AddressError: A file that TLS needs cannot be used.
        BusRefused: Each refuses.
        BrokerConnectError: None can be reached now.
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
    """Return the error to raise where a retry cannot succeed, else None."""
    where, host = address(url), urlsplit(url).hostname or ""
    server = tls.server_name if tls is not None and tls.server_name else host
    if (problem := tls_problem(error, where, server, tls)) is not None:
        return BusRefused(problem)
    if urlsplit(url).scheme == "amqp" and answers_with_tls(first):
        return BusRefused(f"the broker at {where} speaks TLS, but broker.url begins with amqp: write amqps://")
    if isinstance(error, InvalidFrameError):
        return BusRefused(_refused_vhost(url))
    return None


def refused_access(said: str) -> str:
    """Return an error text: the broker's reason for refusing an operation, and what to do."""
    name = re.search(r"'tmq\.([a-z0-9-]{1,40})\.", said)
    run = name.group(1) if name is not None else "RUN"
    return f"the broker refuses it: {said}; `trinity-mq broker permissions {run}` says what each kind of user needs"


def _drain(transport: AbstractConnection) -> None:
    """Empty the write queue of a dead connection until no task puts more: a full queue would block them for ever."""
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
