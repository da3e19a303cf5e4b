"""Reads the properties of every message that a broker delivers, and writes the properties of outgoing messages.

The AMQP client closes the connection on properties that it cannot decode (a timestamp in the year 10^8, an id that is
not UTF-8, tables nested a thousand deep), and the broker would redeliver them to the next connection. This module reads
everything that has the form of AMQP. Of the headers it reads only text, numbers and booleans, so nothing nests.
"""

from __future__ import annotations

import struct
from typing import Any

from aiormq import spec
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from pamqp import encode, exceptions, frame, header

FRAME_HEADER, FRAME_METHOD = 2, 1
DELIVER = struct.pack(">HH", 60, 60)
FORMATS = {tag.encode(): struct.Struct(f">{form}") for tag, form in zip("tbBsuIilLfd", "?bBhHiIqqfd", strict=True)}
"""Struct formats of header values, by type tag: booleans and numbers. Text values are read without this table."""
SKIPPED = {b"D": 5, b"T": 8, b"V": 0, b"\0": 0}
"""Bytes of header values that are skipped, by type tag: decimals, timestamps, empty values."""
SIZED = b"SAFx"
"""Tags of values that begin with their own length."""
USED = {"content_type", "correlation_id", "reply_to", "message_id"}
"""Properties that this project uses, in addition to the headers."""


class ReadHeader(header.ContentHeader):
    """Content header of a delivered message."""

    unreadable: str | None = None
    """Reason why a property that this project uses cannot be read. None: all can be read."""


class TolerantReceiver(FrameReceiver):
    """Reads the frames of a connection. Content headers of messages are read by :func:`read_header`."""

    async def get_frame(self) -> tuple[int, int, Any]:
        if self.reader.at_eof():
            raise StopAsyncIteration
        try:
            head = await self.reader.readexactly(7)
            rest = await self.reader.readexactly(int.from_bytes(head[3:], "big") + 1)
        except (EOFError, OSError) as error:
            raise AMQPConnectionError(f"the connection ended: {error or type(error).__name__}") from error
        if head[0] == FRAME_HEADER:
            return len(head) + len(rest), int.from_bytes(head[1:3], "big"), read_header(rest[:-1])
        try:
            return frame.unmarshal(head + rest)
        except exceptions.PAMQPException as error:
            if head[0] == FRAME_METHOD and rest[:4] == DELIVER:
                return len(head) + len(rest), int.from_bytes(head[1:3], "big"), _read_deliver(rest)
            raise InvalidFrameError(str(error)) from error


class Properties(spec.Basic.Properties):
    """Properties that encode floating-point headers with 8 bytes. The client encodes them with 4 bytes."""

    def encode_property(self, name: str, value: Any) -> bytes:
        if name != "headers":
            return super().encode_property(name, value)
        table = b"".join(_entry(key, item) for key, item in value.items())
        return struct.pack(">I", len(table)) + table


def read_header(data: bytes) -> ReadHeader:
    """Return the content header in the payload of a frame. Unused properties are skipped."""
    content_header = ReadHeader()
    try:
        content_header.class_id, content_header.weight, content_header.body_size = struct.unpack_from(">HHQ", data)
        (flags,) = struct.unpack_from(">H", data, 12)
        _read_properties(content_header, flags, data, 14)
    except (struct.error, IndexError) as error:
        content_header.unreadable = f"its properties are cut off: {error}"
    except ValueError as error:
        content_header.unreadable = str(error)
    return content_header


def _read_properties(content_header: ReadHeader, flags: int, data: bytes, at: int) -> None:
    if flags & 1:
        raise ValueError("it has properties that AMQP 0-9-1 does not know")
    properties: Any = content_header.properties
    for name, flag in properties.flags.items():
        if not flags & flag:
            continue
        kind = properties.amqp_type(name)
        if kind == "table":
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            properties.headers = {}
            _read_table(properties.headers, data[:end], at + 4)
            at = end
        elif kind == "shortstr":
            end = at + 1 + data[at]
            if name in USED:
                setattr(properties, name, _text(content_header, name, data[at + 1 : end]))
            at = end
        else:
            at += {"octet": 1, "timestamp": 8}[kind]
    if at > len(data):
        raise ValueError("its properties are cut off")


def _read_table(fields: dict[str, Any], data: bytes, at: int) -> None:
    """Add the headers to ``fields``. Skipped headers get the value None."""
    while at < len(data):
        start = at + 1 + data[at]
        name = data[at + 1 : start].decode("utf-8", "backslashreplace")
        tag, at = data[start : start + 1], start + 1
        fields[name] = None
        if tag in FORMATS:
            fields[name] = FORMATS[tag].unpack_from(data, at)[0]
            at += FORMATS[tag].size
        elif tag in SKIPPED:
            at += SKIPPED[tag]
        elif tag and tag in SIZED:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if tag == b"S":
                fields[name] = _utf8(data[at + 4 : end])
            at = end
        else:
            raise ValueError(f"header {name[:80]!r} has the unknown type {tag!r}")
    if at > len(data):
        raise ValueError("its headers are cut off")


def _text(content_header: ReadHeader, name: str, data: bytes) -> str:
    text = _utf8(data)
    if text is None:
        content_header.unreadable = content_header.unreadable or f"its property {name} is not UTF-8: {data[:40]!r}"
        return data.decode("utf-8", "backslashreplace")
    return text


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _read_deliver(data: bytes) -> spec.Basic.Deliver:
    """Return a Basic.Deliver with names that are not UTF-8. A routing key may contain any bytes."""
    names, at = [], 4
    for skipped in (9, 0, 0):  # delivery tag and redelivered follow the consumer tag
        end = at + 1 + data[at]
        names.append((data[at + 1 : end].decode("utf-8", "backslashreplace"), end))
        at = end + skipped
    (tag, end), (exchange, _), (key, _) = names
    number, redelivered = struct.unpack_from(">Q?", data, end)
    return spec.Basic.Deliver(
        consumer_tag=tag, delivery_tag=number, redelivered=redelivered, exchange=exchange, routing_key=key
    )


def _entry(name: str, value: Any) -> bytes:
    data = name.encode()
    packed = b"d" + struct.pack(">d", value) if isinstance(value, float) else encode.encode_table_value(value)
    return bytes([len(data)]) + data + packed
