"""One plain AMQP connection, and the translation of the client's many errors into the few that decide what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from urllib.parse import unquote, urlsplit

from aio_pika.connection import Connection, make_url
from aiormq.abc import AbstractConnection
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    InvalidFrameError,
    ProbableAuthenticationError,
)

from trinity_mq.bus._rabbit_sending import GatheringTransport
from trinity_mq.bus.base import BusRefused, QueueGone

CONNECT_TIMEOUT = 10.0
"""For one attempt; a host that drops packets never refuses."""
CLOSE_TIMEOUT = 5.0

for _name in ("aiormq", "aio_pika"):
    if logging.getLogger(_name).level == logging.NOTSET:
        # What it logs on a lost connection, with tracebacks, we report ourselves in one line.
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class LinkError(Exception):
    """The connection or channel was lost, or the broker is not ready for this queue: try again."""


class Locked(BusRefused):
    """The exclusive queue belongs to another connection."""


class InequivalentError(LinkError):
    """The queue exists with other arguments."""


@contextlib.contextmanager
def amqp_errors() -> Iterator[None]:
    """Translate what the AMQP client raises into LinkError, Locked, InequivalentError, QueueGone or BusRefused."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The client cancels the futures of a connection that died; nobody cancelled us.
        raise LinkError("connection lost") from error
    except ChannelNotFoundEntity as error:
        # Just after a restart a durable queue is "down or inaccessible": also not found, but not gone.
        if "no queue" in str(error):
            raise QueueGone(str(error)) from error
        raise LinkError(str(error)) from error
    except ChannelLockedResource as error:
        raise Locked(str(error)) from error
    except ChannelPreconditionFailed as error:
        raise InequivalentError(str(error)) from error
    except ChannelAccessRefused as error:
        raise BusRefused(str(error)) from error
    except (AMQPError, ChannelInvalidStateError, OSError) as error:
        raise LinkError(str(error) or type(error).__name__) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # Futures of a connection that we closed ourselves are rejected with a bare Exception.
        raise LinkError("connection closed") from error


class Link:
    """An open connection."""

    def __init__(self, connection: Connection, transport: AbstractConnection) -> None:
        self._connection, self._transport = connection, transport

    @classmethod
    async def open(cls, url: str, name: str, heartbeat: float, on_lost: Callable[[str], None]) -> Link:
        """Connect; ``on_lost`` is called with the reason when the connection goes.

        Raises:
            BusRefused: Wrong password or virtual host.
            LinkError: The broker cannot be reached now.
        """
        connection = Connection(make_url(url, heartbeat=round(heartbeat)), client_properties={"connection_name": name})
        connection.kwargs["transport_factory"] = GatheringTransport()
        try:
            with amqp_errors():
                try:
                    await connection.connect(timeout=CONNECT_TIMEOUT)
                except (ProbableAuthenticationError, AuthenticationError) as error:
                    raise BusRefused(_refused_login(url)) from error
                except InvalidFrameError as error:
                    raise BusRefused(_refused_vhost(url)) from error
            if connection.transport is None:
                raise LinkError("connection lost")
        except BaseException:
            await connection.close()
            raise
        transport = connection.transport.connection

        def lost(closing: asyncio.Future[object]) -> None:
            _drain(transport)
            on_lost(_reason(closing))

        transport.closing.add_done_callback(lost)
        return cls(connection, transport)

    @property
    def alive(self) -> bool:
        """Still open."""
        return not self._transport.is_closed

    @property
    def version(self) -> str:
        """The broker's version, as it says."""
        return str(self._transport.server_properties.get("version", "unknown"))

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a channel; with ``confirms``, a returned message raises PublishError."""
        with amqp_errors():
            if self._transport.is_closed:
                raise LinkError("connection lost")
            channel = await self._transport.channel(publisher_confirms=confirms, on_return_raises=True)
        if not isinstance(channel, Channel):
            raise TypeError(f"the AMQP client made a {type(channel).__name__}, wanted {Channel.__name__}")
        return channel

    async def unblocked(self) -> None:
        """Return when the broker does not block this connection; never, once it is lost."""
        await self._transport.ready()

    async def close(self) -> None:
        """Close; at most five seconds are spent on a broker that does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._connection.close()


def address(url: str) -> str:
    """Return ``host:port`` of a broker's URL."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"


def _drain(transport: AbstractConnection) -> None:
    """Empty the write queue of a dead connection until nobody puts more: who waits for a place waits for ever else."""
    if transport.write_queue.empty():
        return
    while not transport.write_queue.empty():
        transport.write_queue.get_nowait()
    asyncio.get_running_loop().call_soon(_drain, transport)


def _reason(closing: asyncio.Future[object]) -> str:
    error = asyncio.CancelledError() if closing.cancelled() else closing.exception()
    return str(error) or "connection lost" if error is not None else "connection closed"


def _user(url: str) -> str:
    return unquote(urlsplit(url).username or "guest")


def _refused_login(url: str) -> str:
    return (
        f"the broker at {address(url)} refuses user {_user(url)!r}: wrong user name or password; "
        "set them in broker.url or TRINITY_MQ_BROKER_URL (amqp://user:password@host:port/vhost)"
    )


def _refused_vhost(url: str) -> str:
    vhost = unquote(urlsplit(url).path[1:]) or "/"
    return (
        f"the broker at {address(url)} does not open virtual host {vhost!r} (the last part of broker.url) to user "
        f"{_user(url)!r}: it does not exist, or the user has no permission on it; see `rabbitmqctl list_vhosts` and "
        "`rabbitmqctl list_permissions`"
    )
