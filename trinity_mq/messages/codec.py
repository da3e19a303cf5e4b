"""Encodes control-plane bodies as msgpack maps with named fields. Decodes msgpack and JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from trinity_mq.messages.base import Message
from trinity_mq.messages.batches import BatchClosed, BatchReady, ExperienceReference, Mark, Progress, RunEnd
from trinity_mq.messages.msgpack_scan import (
    MAX_CONTAINERS,
    MAX_NESTING,
    QUICK_ARRAY_LENGTH,
    ContentError,
    check_value,
    container_bytes,
    is_whole,
    is_within_limits,
    scan,
)
from trinity_mq.messages.reviews import ReviewClosed, ReviewRequest, ReviewVerdict
from trinity_mq.messages.sessions import (
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionRefused,
    SessionReward,
    SessionsCommitted,
    SessionsDecided,
    SessionsTrained,
)
from trinity_mq.messages.sync import SyncEvent
from trinity_mq.messages.tasks import SubmissionOutcome, TaskResult, TaskResults, TaskSlice, TaskSlices, TaskSubmission
from trinity_mq.messages.telemetry import ControlEvent, Heartbeat, Metrics

CONTENT_TYPE = "application/msgpack"
JSON_CONTENT_TYPE = "application/json"

M = TypeVar("M", bound=Message)

CATALOGUE: Mapping[tuple[str, int], type[Message]] = {
    (cls.kind, cls.version_number): cls
    for cls in (
        TaskSubmission,
        SubmissionOutcome,
        TaskSlice,
        TaskSlices,
        TaskResult,
        TaskResults,
        BatchClosed,
        BatchReady,
        ExperienceReference,
        Mark,
        Progress,
        RunEnd,
        SessionOpened,
        SessionCall,
        SessionReward,
        SessionEnd,
        SessionsCommitted,
        SessionsDecided,
        SessionsTrained,
        SessionRefused,
        ReviewRequest,
        ReviewVerdict,
        ReviewClosed,
        SyncEvent,
        Heartbeat,
        Metrics,
        ControlEvent,
    )
}
"""Every body that is a message by itself, by kind and version. Each kind is listed in its newest version."""

UPGRADES: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Functions that convert the fields of a body to the next version, by kind and old version."""


LONG_NUMBER = re.compile(rb"\d[\d_]{18}")
"""Digits in a text that pydantic may convert to an integer beyond 64 bits."""


class DecodeError(ValueError):
    """A body that cannot be decoded; the message names the received and the expected content."""


class NewerBodyError(DecodeError):
    """A body in a version that only newer releases read."""


def encode(message: Message) -> bytes:
    """Return the msgpack body of ``message``: its fields by name plus ``kind`` and ``version_number``. Every reader
    accepts the result: a message that :func:`decode` would refuse raises here.

    Raises:
        ContentError: The message holds a value that cannot travel.
    """
    try:
        body = message.model_dump(mode="python")
        body |= {"kind": message.kind, "version_number": message.version_number}
        return _packed(body)
    except ContentError as error:
        error.path.insert(0, message.kind)
        raise
    except (ValueError, RecursionError) as error:  # pydantic raises these for values that contain themselves
        raise ContentError(f"{message.kind} cannot be written: {error}") from error


def _packed(body: dict[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(body, use_bin_type=True)
        fits = is_within_limits(body, MAX_NESTING)
    except (ValueError, TypeError, OverflowError) as error:
        check_value(body)
        raise ContentError(f"msgpack cannot hold it: {error}") from error
    if not fits:
        check_value(body)
    if container_bytes(packed) > MAX_CONTAINERS:
        scan(packed)
    return packed


def decode(body: bytes, expect: type[M], content_type: str | None = CONTENT_TYPE) -> M:
    """Return the message in ``body``; a body of an older version is upgraded.

    Args:
        body: The bytes received.
        expect: The expected class. The body may omit its kind, and also version 1.
        content_type: JSON if this is the JSON content type, else msgpack.

    Raises:
        DecodeError: The bytes are not a map, have another kind or a newer version, or a field is wrong.
    """
    fields, checked = _fields(body, content_type)
    kind = fields.get("kind", expect.kind)
    if kind != expect.kind:
        raise DecodeError(f"body is a {_short(kind)}, wanted a {expect.kind!r}")
    return _message(fields, expect, checked)


def decode_any(body: bytes, content_type: str | None = CONTENT_TYPE) -> Message:
    """Return the message in ``body``, of the class that the body's ``kind`` names.

    Raises:
        DecodeError: In the same cases as :func:`decode`, and if the kind is not in the catalogue.
    """
    fields, checked = _fields(body, content_type)
    kind_name = fields.get("kind")
    cls = next((cls for (kind, _), cls in CATALOGUE.items() if kind == kind_name), None)
    if cls is None:
        known_kinds = ", ".join(sorted({kind for kind, _ in CATALOGUE}))
        raise DecodeError(f"unknown kind {_short(kind_name)}; known kinds: {known_kinds}")
    return _message(fields, cls, checked)


def _message(fields: dict[str, Any], cls: type[M], checked: bool) -> M:
    version = fields.get("version_number", 1)
    if type(version) is not int or not 1 <= version <= cls.version_number:
        kind = NewerBodyError if type(version) is int and version > 0 else DecodeError
        raise kind(
            f"{cls.kind} of version {_short(version)}, this release reads 1 to {cls.version_number}; upgrade it, or "
            "send it a body of a version that it reads"
        )
    for old in range(version, cls.version_number):
        try:
            fields = UPGRADES[cls.kind, old](fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"{cls.kind} of version {version} cannot be upgraded from {old}: {error!r}") from error
    try:
        message = cls.model_validate(fields)
        if not checked:
            encode(message)
        return message
    except ContentError as error:
        raise DecodeError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "(body)"
        raise DecodeError(
            f"{cls.kind}: field {where}: {first['msg']}, got {_short(first['input'])}"
            + (f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else "")
        ) from error


def _fields(body: bytes, content_type: str | None) -> tuple[dict[str, Any], bool]:
    """Return the fields in a body, and True if none of their numbers can exceed 64 bits."""
    format_name, read = ("JSON", _from_json) if content_type == JSON_CONTENT_TYPE else ("msgpack", _from_msgpack)
    try:
        fields, packed = read(body)
    except DecodeError:
        raise
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise DecodeError(f"body of {len(body)} bytes is not {format_name}: {error or type(error).__name__}") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"body is a {type(fields).__name__}, wanted a map with named fields")
    return fields, LONG_NUMBER.search(packed) is None


def _from_msgpack(body: bytes) -> tuple[Any, bytes]:
    containers = container_bytes(body)  # upper bound
    if containers <= MAX_NESTING:
        with contextlib.suppress(ValueError):
            return _unpack(body, QUICK_ARRAY_LENGTH), body
    if containers > MAX_CONTAINERS or not is_whole(body):
        scan(body)  # raises if the body nests too deep, has too many containers or is shorter than it claims
    fields = _unpack(body, len(body))  # a claimed length over the body's length cannot allocate memory
    if containers > MAX_NESTING and not is_within_limits(fields, MAX_NESTING):
        scan(body)
    return fields, body


def _unpack(body: bytes, longest: int) -> Any:
    return msgpack.unpackb(
        body,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=distinct,
        max_array_len=longest,
        max_map_len=longest,
    )


def _from_json(body: bytes) -> tuple[Any, bytes]:
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise DecodeError(f"more than {MAX_CONTAINERS} opening brackets in one body; send it as msgpack")
    fields = json.loads(body, object_pairs_hook=distinct, parse_constant=_no_number, parse_float=_finite)
    try:
        return fields, _packed(fields)  # a JSON body may be forwarded as msgpack
    except ContentError as error:
        raise DecodeError(f"the body cannot be forwarded: {error}") from error


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the items of a map as a dict.

    Raises:
        DecodeError: A key is repeated.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DecodeError(f"the key {_short(twice)} is repeated in one map")
    return fields


def _no_number(literal: str) -> float:
    raise DecodeError(f'{literal} is not valid JSON; for a number field, send the text "{literal}" instead')


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise DecodeError(f"the number {literal[:40]} is beyond the range of 64-bit floats")
    return number


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
