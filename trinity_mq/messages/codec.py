"""Control-plane bodies to bytes and back: msgpack maps with named fields; JSON is accepted on the way in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from trinity_mq.messages.base import Message
from trinity_mq.messages.batches import BatchClosed, BatchReady, Mark, Progress, RunEnd
from trinity_mq.messages.sync import SyncEvent
from trinity_mq.messages.tasks import SubmissionOutcome, TaskResult, TaskSlice, TaskSubmission
from trinity_mq.messages.telemetry import Beat, ControlEvent, Metrics

CONTENT_TYPE = "application/msgpack"
JSON_CONTENT_TYPE = "application/json"
MAX_NESTING = 64

M = TypeVar("M", bound=Message)

CATALOGUE: Mapping[tuple[str, int], type[Message]] = {
    (cls.kind, cls.version_number): cls
    for cls in (
        TaskSubmission,
        SubmissionOutcome,
        TaskSlice,
        TaskResult,
        BatchClosed,
        BatchReady,
        Mark,
        Progress,
        RunEnd,
        SyncEvent,
        Beat,
        Metrics,
        ControlEvent,
    )
}
"""Every body that travels by itself, by kind and version."""


class DecodeError(ValueError):
    """A body is not what it should be; the message says what was seen and what was wanted."""


def encode(message: Message) -> bytes:
    """Return the msgpack body of ``message``: its fields by name plus ``kind`` and ``version_number``."""
    body = message.model_dump(mode="python")
    body["kind"] = message.kind
    body["version_number"] = message.version_number
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def decode(body: bytes, expect: type[M], content_type: str | None = CONTENT_TYPE) -> M:
    """Return the message in ``body``.

    Raises:
        DecodeError: The bytes are no map, are of another kind or version, or a field is wrong.
    """
    fields = _fields(body, content_type)
    kind = fields.pop("kind", expect.kind)
    version = fields.pop("version_number", expect.version_number)
    if (kind, version) != (expect.kind, expect.version_number):
        raise DecodeError(
            f"body is {kind!r} version {version!r}, wanted {expect.kind!r} version {expect.version_number}"
        )
    try:
        return expect.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "(body)"
        raise DecodeError(
            f"{expect.kind}: field {where}: {first['msg']}, got {_short(first['input'])}"
            + (f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else "")
        ) from error


def decode_any(body: bytes, content_type: str | None = CONTENT_TYPE) -> Message:
    """Return the message in ``body``, its class chosen by its own ``kind`` and ``version_number``.

    Raises:
        DecodeError: As :func:`decode`, or the kind is not in the catalogue.
    """
    fields = _fields(body, content_type)
    key = (fields.get("kind"), fields.get("version_number", 1))
    cls = CATALOGUE.get(key) if isinstance(key[0], str) and isinstance(key[1], int) else None  # type: ignore[arg-type]
    if cls is None:
        known = ", ".join(sorted({kind for kind, _ in CATALOGUE}))
        raise DecodeError(f"unknown kind {key[0]!r} version {key[1]!r}; known kinds: {known}")
    return decode(body, cls, content_type)


def _fields(body: bytes, content_type: str | None) -> dict[str, Any]:
    try:
        if content_type == JSON_CONTENT_TYPE:
            fields = json.loads(body)
        else:
            fields = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        wanted = "JSON" if content_type == JSON_CONTENT_TYPE else "msgpack"
        raise DecodeError(f"body of {len(body)} bytes is not {wanted}: {error or type(error).__name__}") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"body is a {type(fields).__name__}, wanted a map with named fields")
    if _too_deep(fields, MAX_NESTING):
        raise DecodeError(f"body is nested deeper than {MAX_NESTING} levels")
    return fields


def _too_deep(value: Any, left: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    if left == 0:
        return True
    return any(_too_deep(item, left - 1) for item in (value.values() if isinstance(value, dict) else value))


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
