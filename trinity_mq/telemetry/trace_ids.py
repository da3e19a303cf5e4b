"""Identity of the trace of a batch: ids that every process of a run computes alike, and the header ``traceparent``.

Ids are hashes, so that processes need not exchange them. The id of a trace is a hash of the run's trace key and the
batch. The ids of its spans are hashes of the trace and of their content. The header is the W3C Trace Context header,
``00-<trace>-<parent>-<flags>``.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from pathlib import Path

TRACEPARENT = "traceparent"
"""Trace header of messages and of HTTP requests."""
MOST_KNOWN = 1000
"""Maximum number of batches whose export decision is cached."""
LINK = "tmq.link"
"""Attribute of a span. Its value is the ``traceparent`` of outside work that the span continues."""
VERSION = "tmq.version"
"""Attribute of a span. Its value is the weight version, ``generation.step``, that was synced or that the span's batch
produced.
"""
KEY_FILE = "key"
"""File with the trace key of a run, next to its spans. A new run under an old name gets another key, so its traces
differ.
"""


_HEADER = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?\Z")
"""Format of ``traceparent``. A later version of the header may have more fields after the flags."""


def trace_key(folder: Path) -> str:
    """Return the trace key in a run's folder of spans. The first process that calls this function creates the key.

    Raises:
        OSError: The folder is not writable.
    """
    path = folder / KEY_FILE
    if not path.exists():
        new_file = path.with_name(f"{KEY_FILE}.{uuid.uuid4().hex}")
        new_file.write_text(f"{uuid.uuid4().hex}\n", encoding="ascii")
        try:
            os.link(new_file, path)  # fails if another process was first
        except FileExistsError:
            pass
        finally:
            new_file.unlink()
    return path.read_text(encoding="ascii").strip()


def trace_id(key: str, batch: int | str) -> str:
    """Return the id of the trace of a batch, as 32 hexadecimal digits."""
    return _hash(16, key, batch)


def batch_span(trace: str) -> str:
    """Return the id of the root span of a trace."""
    return _hash(8, trace, "batch")


def phase_span(trace: str, phase: str) -> str:
    """Return the id of the span of a phase of a batch."""
    return _hash(8, trace, "phase", phase)


def task_span(trace: str, task: int) -> str:
    """Return the id of the span of a task of a batch."""
    return _hash(8, trace, "task", task)


def recorded_span(trace: str, agent: str, what: str, task: tuple[int, int] | None, start: int) -> str:
    """Return the id of a span that a process recorded.

    Args:
        trace: Trace id of its batch.
        agent: Id of the process.
        what: Name of the span.
        task: Id and first run of its task slice. None: the span belongs to no task.
        start: Start in microseconds of the process's monotonic clock.
    """
    return _hash(8, trace, agent, what, task, start)


def is_sampled(trace: str, ratio: float) -> bool:
    """Return whether a trace is exported if the share ``ratio`` of all traces is exported. OpenTelemetry's
    ``TraceIdRatioBased`` with the same ratio decides in the same way.
    """
    return int(trace[16:], 16) < round(ratio * 2**64)


class Sampled:
    """Set of the batches whose traces are exported.

    Args:
        key: Trace key of the run.
        ratio: Share of the batches that are exported.

    >>> 7 in Sampled("key", 1.0), 7 in Sampled("key", 0.0)
    (True, False)
    """

    def __init__(self, key: str, ratio: float) -> None:
        self.key, self._ratio = key, ratio
        self._known: dict[int | str, bool] = {}
        """Cached decisions by batch, because a batch is looked up for each of its spans."""

    def __contains__(self, batch: int | str) -> bool:
        if (sampled := self._known.get(batch)) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            sampled = self._known[batch] = is_sampled(trace_id(self.key, batch), self._ratio)
        return sampled


def traceparent(trace: str, span: str, *, sampled: bool) -> str:
    """Return the header value for work below a span."""
    return f"00-{trace}-{span}-{'01' if sampled else '00'}"


def read_traceparent(text: str) -> tuple[str, str] | None:
    """Return the trace id and span id in a header value. Return None if the value is not valid W3C Trace Context.

    >>> read_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    ('0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331')
    """
    match = _HEADER.match(text.strip())
    if match is None or match["version"] == "ff" or not match["trace"].strip("0") or not match["span"].strip("0"):
        return None
    return match["trace"], match["span"]


def _hash(size: int, *parts: object) -> str:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=size).hexdigest()
