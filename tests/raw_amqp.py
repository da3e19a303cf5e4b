"""A publisher that writes AMQP frames itself, as a client library would refuse to: any bytes as properties."""

from __future__ import annotations

import socket
import struct
from urllib.parse import unquote, urlsplit

FLAGS = {
    name: 1 << 15 - number
    for number, name in enumerate(
        (
            *("content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to"),
            *("expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
        )
    )
}
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8


def short(data: bytes) -> bytes:
    """Return a short string."""
    return bytes([len(data)]) + data


def long(data: bytes) -> bytes:
    """Return a long string, or a table of these entries."""
    return struct.pack(">I", len(data)) + data


def properties(**values: bytes) -> bytes:
    """Return flags and properties; each value is already encoded."""
    names = [name for name in FLAGS if name in values]
    return struct.pack(">H", sum(FLAGS[name] for name in names)) + b"".join(values[name] for name in names)


def nested(depth: int) -> bytes:
    """Return the entry of a table that holds a table, ``depth`` times."""
    value = b"V"
    for _ in range(depth):
        value = b"F" + long(short(b"a") + value)
    return short(b"a") + value


class RawPublisher:
    """A connection with one channel that waits for confirms; blocks."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        login = (
            b"\0" + unquote(parts.username or "guest").encode() + b"\0" + unquote(parts.password or "guest").encode()
        )
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5672), timeout)
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self._reply()
        self._method(0, 10, 11, long(b"") + short(b"PLAIN") + long(login) + short(b"en_US"))
        tune = self._reply()
        self._method(0, 10, 31, tune[4:12])
        self._method(0, 10, 40, short(unquote(parts.path[1:] or "/").encode()) + short(b"") + b"\0")
        self._reply()
        self._method(1, 20, 10, short(b""))
        self._reply()
        self._method(1, 85, 10, b"\0")
        self._reply()

    def publish(self, exchange: str, key: bytes, body: bytes, fields: bytes) -> bool:
        """Publish with these properties; return whether the broker confirmed. Raises EOFError where it hangs up."""
        self._method(1, 60, 40, b"\0\0" + short(exchange.encode()) + short(key) + b"\0")
        self._send(HEADER, 1, struct.pack(">HHQ", 60, 0, len(body)) + fields)
        if body:
            self._send(BODY, 1, body)
        return self._reply()[:4] == struct.pack(">HH", 60, 80)

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: int, channel: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    def _method(self, channel: int, group: int, method: int, arguments: bytes) -> None:
        self._send(METHOD, channel, struct.pack(">HH", group, method) + arguments)

    def _reply(self) -> bytes:
        while True:
            kind, _, size = struct.unpack(">BHI", self._read(7))
            payload = self._read(size + 1)[:-1]
            if kind != HEARTBEAT:
                return payload

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("the broker closed the connection")
            data += part
        return data
