"""Finds free ports on loopback, and checks whether an AMQP broker answers on a port."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import secrets
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
AMQP_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"
FIRST_CANDIDATE = 20_000
MOST_HELD = 64
"""Maximum number of ports held at a time. An older port can be released, because its server listens by then."""
_reserved: set[int] = set()
"""Ports assigned in this process. Their servers possibly do not listen yet."""
_held: deque[socket.socket] = deque()
"""Sockets bound to the newest assigned ports, so that another process cannot get such a port before its server
listens."""


def is_free(port: int) -> bool:
    """Return whether no process listens on ``port``. Lingering connections of an earlier listener do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Return ``count`` free ports. They are below the ephemeral range, so that outgoing connections do not take them.
    On Linux other processes that call this function do not get the same ports, even if the servers listen late.
    """
    end = _ephemeral_start()
    candidate = FIRST_CANDIDATE + secrets.randbelow(max(1, end - FIRST_CANDIDATE - 2000))
    ports: list[int] = []
    while len(ports) < count:
        candidate += 1
        if candidate not in _reserved and (holder := _bound_alone(candidate)) is not None:
            ports.append(candidate)
            _hold(holder)
    _reserved.update(ports)
    return ports


def _bound_alone(port: int) -> socket.socket | None:
    """Return a socket bound to ``port``; None if another socket is bound to it, whether it listens or not."""
    holder = socket.socket()
    try:
        holder.bind((LOOPBACK, port))
    except OSError:
        holder.close()
        return None
    return holder


def _hold(holder: socket.socket) -> None:
    """Keep a socket bound, and let the server bind to its port as well. Linux allows this if both sockets set
    ``SO_REUSEADDR``, as servers do, and neither listens. On other systems the socket is closed.
    """
    if sys.platform != "linux":
        holder.close()
        return
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    while len(_held) > MOST_HELD:
        _held.popleft().close()


@atexit.register
def _release_held() -> None:
    while _held:
        _held.pop().close()


def _ephemeral_start() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32_768


async def accepts_connections(port: int) -> bool:
    """Return whether a process accepts connections on ``port``."""
    try:
        async with _connected(port):
            return True
    except OSError:
        return False


async def speaks_amqp(port: int) -> bool:
    """Return whether the server on ``port`` answers the AMQP protocol header with Connection.Start. RabbitMQ is then
    ready, because it opens this listener last.
    """
    try:
        async with _connected(port) as (reader, writer), asyncio.timeout(5):
            writer.write(AMQP_HEADER)
            return await reader.read(1) == METHOD_FRAME
    except (OSError, TimeoutError):
        return False


@contextlib.asynccontextmanager
async def _connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
