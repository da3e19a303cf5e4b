"""An outgoing message, and the limits on its properties and headers: lengths, types, ranges."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

HeaderValue = str | int | float | bool

MAX_PROPERTY = 255
"""Maximum bytes of UTF-8 in a property or routing key, from AMQP's short strings."""
MAX_HEADER_NAME = 128
"""Maximum bytes of UTF-8 in a header name, from AMQP's field names."""
MAX_HEADERS = 96 * 1024
"""Maximum bytes of all headers of a message. They must fit in a frame, and the broker's frames have 128 KiB."""
MAX_OUTSIDE_HEADERS = 32 * 1024
"""Maximum bytes of an outside program's headers in a copy of its message. The run's own headers are added to them."""
KEPT_OF_ID = 160
"""Bytes from the beginning of an overlong property that are kept. The SHA-256 of the whole text follows them."""
MAX_INT = 2**63 - 1
FIXED_BYTES = 16
"""Maximum bytes of a header in addition to its name and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An outgoing message."""

    body: bytes
    kind: str
    """Kind of the message, also sent as header ``kind``."""
    message_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the message. It is deterministic where a repeat must be recognised (docs/protocol.md, Keys)."""
    content_type: str = "application/msgpack"
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    correlation_id: str | None = None
    reply_to: str | None = None

    def of_run(self, run_id: str | None) -> Envelope:
        """Return the message with the header ``run_id``. Return it unchanged if it has this header or ``run_id`` is
        None.
        """
        if run_id is None or "run_id" in self.headers:
            return self
        return replace(self, headers={**self.headers, "run_id": run_id})


class PropertyError(ValueError):
    """A header that AMQP cannot carry, set by this project's own code."""


def publishable(envelope: Envelope) -> Envelope:
    """Return the message with properties that AMQP can carry. Overlong ids and other text properties are shortened.

    Raises:
        PropertyError: AMQP cannot carry the name, type or value of a header, or the headers are too long together.
    """
    headers = {**envelope.headers, "kind": envelope.kind}
    for name, value in headers.items():
        if (problem := _problem(name, value)) is not None:
            raise PropertyError(f"{_text(envelope.kind)[:80]}: header {_text(name)[:80]!r} {problem}")
    if (size := sum(_size(name, value) for name, value in headers.items())) > MAX_HEADERS:
        raise PropertyError(f"{_text(envelope.kind)[:80]}: headers of {size} bytes, wanted at most {MAX_HEADERS}")
    return replace(
        envelope,
        message_id=short_property(envelope.message_id),
        content_type=short_property(envelope.content_type),
        correlation_id=envelope.correlation_id and short_property(envelope.correlation_id),
        reply_to=envelope.reply_to and short_property(envelope.reply_to),
    )


def short_property(text: str) -> str:
    """Return ``text`` if it fits in a property. Otherwise return its beginning and its SHA-256, which is
    deterministic.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_PROPERTY:
        return data.decode()
    return f"{data[:KEPT_OF_ID].decode('utf-8', 'ignore')}-{hashlib.sha256(data).hexdigest()}"


def header_text(text: str, limit: int) -> str:
    """Return the first ``limit`` characters of ``text``, with characters that UTF-8 cannot encode escaped."""
    return _text(text[:limit])[:limit]


def outside_headers(headers: Mapping[str, object]) -> tuple[dict[str, HeaderValue], tuple[str, ...]]:
    """Return the headers of an outside program that can be republished, and the names of the other headers.

    The broker's own headers (``x-...``) are in neither result.
    """
    sendable: dict[str, HeaderValue] = {}
    omitted: list[str] = []
    room = MAX_OUTSIDE_HEADERS
    for name, value in headers.items():
        if name.startswith("x-"):
            continue
        if not _is_header_value(value) or _problem(name, value) is not None or _size(name, value) > room:
            omitted.append(name)
        else:
            sendable[name] = value
            room -= _size(name, value)
    return sendable, tuple(omitted)


def omitted_headers_text(names: Iterable[str]) -> str:
    """Return a phrase that names the omitted headers. It is empty if no header was omitted."""
    names = list(names)
    if not names:
        return ""
    first_names = ", ".join(header_text(name, 40) for name in names[:5])
    return f"; headers left out: {first_names}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def clamped(value: object) -> int:
    """Return a counter from a header: at most 2^31 - 1, and 0 for a value that is not a positive integer."""
    return min(value, 2**31 - 1) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _problem(name: str, value: object) -> str | None:
    """Return the reason why a header cannot be sent. Return None if it can."""
    try:
        if len(name.encode()) > MAX_HEADER_NAME:
            return f"has a name of {len(name.encode())} bytes, wanted at most {MAX_HEADER_NAME}"
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        return "has text that UTF-8 cannot hold"
    if not _is_header_value(value):
        return f"is a {type(value).__name__}, wanted text, a number or a truth value"
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        return f"is an integer of {value.bit_length()} bits, wanted one that 64 bits hold"
    return None


def _is_header_value(value: object) -> TypeGuard[HeaderValue]:
    return isinstance(value, str | int | float | bool)


def _size(name: str, value: HeaderValue) -> int:
    return FIXED_BYTES + len(name.encode()) + (len(value.encode()) if isinstance(value, str) else 0)


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
