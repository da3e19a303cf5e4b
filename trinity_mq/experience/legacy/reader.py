"""Reads legacy bodies, which hold experiences in the formats of Trinity-RFT: ``TRXP`` version 1, and bare pickles.

A child process with limits reads the body (child.py) and answers with experience bodies, so that this process never
touches the pickle. Values that an experience body cannot hold, such as text arrays in ``info``, are refused. Numpy
scalars become Python numbers and text.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any, Literal

import msgpack

from trinity_mq.experience.batch import decode
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.record import Experience
from trinity_mq.runtime.processes.children import ChildEndedError, ChildServer

MAGIC = b"TRXP"
_PICKLE = b"\x80"
"""First byte of a pickle of protocol 2 or later."""

FREE_BYTES = 1 << 26
GROWTH = 32
"""Limit of an unfolded body in bytes: ``FREE_BYTES`` plus this many times the size of the body. Objects shared in a
pickle are copied."""

Form = Literal["TRXP", "pickle"]

_child = ChildServer(Path(__file__).with_name("child.py"))
atexit.register(_child.close)


def max_unfolded_bytes(size: int) -> int:
    """Return the maximum number of bytes to which a body of ``size`` bytes may unfold."""
    return FREE_BYTES + GROWTH * size


def legacy_form(data: bytes | bytearray | memoryview) -> Form | None:
    """Return the kind of legacy body by the first bytes of ``data``; None if it is not a legacy body."""
    start = bytes(memoryview(data).cast("B")[:4])
    if start.startswith(MAGIC):
        return "TRXP"
    return "pickle" if start.startswith(_PICKLE) else None


def read_legacy(data: bytes | bytearray | memoryview) -> list[Experience]:
    """Return the experiences in a legacy body.

    Raises:
        DecodeError: The body is not a legacy body, refers to names that experiences do not need, or holds an experience
            that breaks a rule; the message then has the number of that experience.
        ChildTimeoutError, ChildNotStartedError: As :func:`read_legacy_each`.
    """
    experiences = []
    for result in read_legacy_each(data):
        if isinstance(result, DecodeError):
            raise result
        experiences.append(result)
    return experiences


def read_legacy_each(data: bytes | bytearray | memoryview) -> list[Experience | DecodeError]:
    """Return each experience in a legacy body, or instead an error that describes its fault.

    Raises:
        DecodeError: The body as a whole cannot be read.
        ChildTimeoutError: The child process did not answer in time; a retry may help.
        ChildNotStartedError: The child process cannot be started.
    """
    if legacy_form(data) is None:
        raise DecodeError(f"the body starts with {bytes(data[:4])!r}, wanted {MAGIC!r} or a pickle: not a legacy body")
    try:
        answer: dict[str, Any] = msgpack.unpackb(_child.ask(bytes(data), max_unfolded_bytes(len(data))))
    except ChildEndedError as error:
        raise DecodeError(
            "the body ends the process that reads it, or expands to far more than its own size"
        ) from error
    if "error" in answer:
        raise DecodeError(answer["error"])
    return [DecodeError(item) if isinstance(item, str) else decode(item)[0] for item in answer["items"]]
