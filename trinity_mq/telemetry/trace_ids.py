"""Identity of a batch's trace: ids that every process of a run computes alike, and the header ``traceparent``.

Ids are hashes, so that no process has to tell another: a batch's trace of the run's trace key and the batch, its spans
of the trace and what they are. The header is that of W3C Trace Context, ``00-<trace>-<parent>-<flags>``.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

TRACEPARENT = "traceparent"
"""Header of messages and of HTTP requests."""
KEY_FILE = "key"
"""File beside a run's spans with its trace key: a run that begins anew under an old name has traces of its own."""


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


def traceparent(trace: str, span: str, *, sampled: bool) -> str:
    """Return the header's value for work below a span."""
    return f"00-{trace}-{span}-{'01' if sampled else '00'}"


def _hash(size: int, *of: object) -> str:
    return hashlib.blake2b("\0".join(map(str, of)).encode(), digest_size=size).hexdigest()
