"""Identity of a batch's trace: ids that every process of a run computes alike, and the header ``traceparent``.

Ids are hashes, so that no process has to tell another: a batch's trace of the run's trace key and the batch, its spans
of the trace and what they are. The header is that of W3C Trace Context, ``00-<trace>-<parent>-<flags>``.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from pathlib import Path

TRACEPARENT = "traceparent"
"""Header of messages and of HTTP requests."""
MOST_KNOWN = 1000
"""Batches of which is remembered whether they are exported."""
LINK = "tmq.link"
"""Attribute of a span with the ``traceparent`` of work outside the run that it goes on with."""
KEY_FILE = "key"
"""File beside a run's spans with its trace key: a run that begins anew under an old name has traces of its own."""


_HEADER = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?\Z")
"""A later version of the header may have more behind the flags."""


def trace_key(folder: Path) -> str:
    """Return the trace key in a run's folder of spans; the first process that asks makes it.

    Raises:
        OSError: The folder cannot be written to.
    """
    path = folder / KEY_FILE
    if not path.exists():
        own = path.with_name(f"{KEY_FILE}.{uuid.uuid4().hex}")
        own.write_text(f"{uuid.uuid4().hex}\n", encoding="ascii")
        try:
            os.link(own, path)  # fails where another process was first
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return path.read_text(encoding="ascii").strip()


def trace_id(key: str, batch: int | str) -> str:
    """Return the id of a batch's trace, 32 hexadecimal digits."""
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
        trace: That of its batch.
        agent: The process.
        what: Its name.
        task: Id and first run of its task, if it is of one.
        start: Microseconds of the process's monotonic clock.
    """
    return _hash(8, trace, agent, what, task, start)


def is_sampled(trace: str, ratio: float) -> bool:
    """Say whether a trace is among the ``ratio`` of all that are exported. OpenTelemetry's ``TraceIdRatioBased`` of the
    same ratio decides alike.
    """
    return int(trace[16:], 16) < round(ratio * 2**64)


class Sampled:
    """The batches of a run whose traces are exported.

    Args:
        key: The run's trace key.
        ratio: Their share.

    >>> 7 in Sampled("key", 1.0), 7 in Sampled("key", 0.0)
    (True, False)
    """

    def __init__(self, key: str, ratio: float) -> None:
        self.key, self._ratio = key, ratio
        self._known: dict[int | str, bool] = {}
        """The answers that were given last: a batch is asked for once for each of its spans."""

    def __contains__(self, batch: int | str) -> bool:
        if (found := self._known.get(batch)) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[batch] = is_sampled(trace_id(self.key, batch), self._ratio)
        return found


def traceparent(trace: str, span: str, *, sampled: bool) -> str:
    """Return the header's value for work below a span."""
    return f"00-{trace}-{span}-{'01' if sampled else '00'}"


def read_traceparent(text: str) -> tuple[str, str] | None:
    """Return the trace and the span in a header's value; None: it is none of W3C Trace Context, or names neither.

    >>> read_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    ('0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331')
    """
    found = _HEADER.match(text.strip())
    if found is None or found["version"] == "ff" or not found["trace"].strip("0") or not found["span"].strip("0"):
        return None
    return found["trace"], found["span"]


def _hash(size: int, *of: object) -> str:
    return hashlib.blake2b("\0".join(map(str, of)).encode(), digest_size=size).hexdigest()
