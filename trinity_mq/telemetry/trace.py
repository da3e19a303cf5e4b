"""Trace of each batch: the work of every process for the batch, with times, in ``<run_dir>/trace/<agent>.jsonl``.

Spans are written for all batches if ``monitor.trace`` is on, and for exported batches if ``monitor.otlp`` is on.
Otherwise a span costs only a check of a variable. Times come from the monotonic clock, which the processes of a host
share. Each process also records the offset of that clock from the time of day. Times of different hosts are therefore
comparable as precisely as their clocks are set (NTP: about a millisecond).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from trinity_mq.telemetry.trace_ids import (
    TRACEPARENT,
    Sampled,
    batch_span,
    recorded_span,
    task_span,
    trace_id,
    trace_key,
    traceparent,
)

TRACE_FOLDER = "trace"
BATCH_HEADER = "X-TMQ-Batch"
"""Header of a traced engine request: the batch of the request."""
TASK_HEADER = "X-TMQ-Task"
"""Header of a traced engine request: id and first run of its task, for example ``3.0``."""
BUFFERED = 512
"""Number of buffered spans at which they are written."""
FLUSH_SECONDS = 1.0
"""Seconds since the last write after which the next span triggers a write of the buffer."""

BATCH: ContextVar[int | str | None] = ContextVar("batch", default=None)
"""Batch that the current asyncio task works for, in processes that work for several batches at a time."""
TASK: ContextVar[tuple[int, int] | None] = ContextVar("task", default=None)
"""Id and first run of the task slice that the current asyncio task works for. The slice is part of ``BATCH``."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span: a single piece of work or a single wait of a process."""

    role: str
    agent: str
    what: str
    start: float
    """Start in seconds since the epoch. Differences between spans of a host are differences of its monotonic clock."""
    end: float
    wait: bool = False
    """True if the process waited for another process or for its turn."""
    cpu: float | None = None
    """Processor seconds of the working thread, or of the whole process if several threads worked. None for waits."""
    count: int = 1
    bytes: int = 0
    batch: int | str = ""
    """Batch of the work. For a weight sync: the batch whose train step made the weights, or ``weights <version>`` if no
    batch of the run made them.
    """
    version: str | None = None
    """Weight version ``generation.step`` that was synced. None: the span is not part of a sync."""
    task: int | None = None
    """Id of the task within the batch. None: the span belongs to no task."""
    first_run: int | None = None
    """First run of the task slice."""
    ticks: int = 0
    """Start in microseconds of the process's own monotonic clock."""
    attributes: Mapping[str, str | int | float] | None = None
    """Further attributes, by their names in OpenTelemetry's conventions."""


Attributes = dict[str, str | int | float]
Row = tuple[object, ...]
"""A buffered span as in the file: what, batch, version, start, end, processor time, count, bytes, wait flag, task
slice, attributes. Times are integer microseconds. The last two fields are omitted if both are None.
"""


class _Recorder:
    """Buffers the spans of this process and writes them in groups: first a line that identifies the process, then lines
    of many spans each.
    """

    def __init__(self, role: str, agent: str, run_dir: Path, sample: float, *, exported_only: bool) -> None:
        folder = run_dir / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.agent, self._sampled, self._exported_only = agent, Sampled(trace_key(folder), sample), exported_only
        self._file = os.open(folder / f"{agent}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._flushed = time.monotonic()
        self._rows: list[Row] = []
        offset = time.time() - self._flushed
        identity = {"role": role, "agent": agent, "clock": _clock(), "pid": os.getpid(), "offset": offset}
        self._write(f"\n{json.dumps(identity)}\n")  # the newline ends a line that a killed process left torn

    def add(self, row: Row, now: float) -> None:
        with self._lock:
            self._rows.append(row)
            if len(self._rows) < BUFFERED and now - self._flushed < FLUSH_SECONDS:
                return
            self._flushed = now
        self.flush()

    def flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        if rows:
            # integers in a single text: three times as fast as an object per span
            self._write(json.dumps(rows, separators=(",", ":")) + "\n")

    def trace(self, batch: int | str) -> tuple[str, bool]:
        """Return the id of the trace of a batch, and whether the trace is exported."""
        trace = trace_id(self._sampled.key, batch)
        return trace, batch in self._sampled

    def leaves_out(self, batch: int | str) -> bool:
        """Return whether the spans of a batch are not recorded because its trace is not exported."""
        return self._exported_only and batch not in self._sampled

    def _write(self, text: str) -> None:
        try:
            os.write(self._file, text.encode())
        except OSError:  # a full disk ends the trace, not the agent
            stop_trace()


def _clock() -> str:
    """Return an id of the monotonic clock. Processes in the same boot of a host share it, including processes in
    containers.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


_recorder: _Recorder | None = None
_at_work: int | str | None = None


def start_trace(
    role: str, agent: str, run_dir: Path, *, on: bool, sample: float = 1.0, exported_only: bool = False
) -> None:
    """Start recording the spans of this process, or stop recording if ``on`` is False.

    Args:
        role: Role of the process.
        agent: Id of the process.
        run_dir: Folder of the run.
        on: Whether to record spans.
        sample: Share of the batches with exported traces, for the flag in ``traceparent``.
        exported_only: Record only spans of exported batches.
    """
    global _recorder  # noqa: PLW0603  # as logging, a process has one
    stop_trace()
    if on:
        _recorder = _Recorder(role, agent, run_dir, sample, exported_only=exported_only)


def stop_trace() -> None:
    """Stop recording, and forget the batch that this process works for. Buffered spans are lost."""
    global _recorder, _at_work  # noqa: PLW0603
    _recorder = _at_work = None


@atexit.register
def flush_trace() -> None:
    """Write buffered spans. Called regularly for live readers, and by processes that exit without running
    ``atexit``.
    """
    if _recorder is not None:
        _recorder.flush()


def works_on(batch: int | str | None) -> None:
    """Set the batch that this process works for until the next call, if it works for a single batch at a time."""
    global _at_work  # noqa: PLW0603
    _at_work = batch


def current_batch() -> int | str | None:
    """Return the batch of the current asyncio task, or else of this process, whether the batch is recorded or not."""
    batch = BATCH.get()
    return _at_work if batch is None else batch


def batch_at_work() -> int | str | None:
    """Return the current batch. Return None if the batch is not recorded."""
    if (recorder := _recorder) is None or (batch := current_batch()) is None or recorder.leaves_out(batch):
        return None
    return batch


def weights_batch(version: str) -> str:
    """Return the name that stands for the batch of a weight version that no batch of the run made."""
    return f"weights {version}"


def trace_headers() -> dict[str, str]:
    """Return the headers that tell an engine the batch and task of a request. The mapping is empty if the batch is not
    recorded.
    """
    if (batch := batch_at_work()) is None:
        return {}
    headers = {BATCH_HEADER: str(batch), **parent_header(batch)}
    if (task := TASK.get()) is not None:
        headers[TASK_HEADER] = f"{task[0]}.{task[1]}"
    return headers


def parent_header(batch: int | str | None = None, task: int | None = None) -> dict[str, str]:
    """Return a mapping with one header, ``traceparent``. It makes the receiver's spans children of the span of
    ``task``, or of the span of ``batch`` if there is no task. The mapping is empty without a batch, or if it is not
    recorded.

    Args:
        batch: The batch. None: the current batch.
        task: Id of a task of the batch. None: the task of the current slice, if there is a slice.
    """
    if (recorder := _recorder) is None:
        return {}
    if batch is None:
        batch = batch_at_work()
    if batch is None or recorder.leaves_out(batch):
        return {}
    if task is None and (slice_at_work := TASK.get()) is not None:
        task = slice_at_work[0]
    trace, sampled = recorder.trace(batch)
    span_id = batch_span(trace) if task is None else task_span(trace, task)
    return {TRACEPARENT: traceparent(trace, span_id, sampled=sampled)}


def works_for(headers: Mapping[str, str]) -> None:
    """Set the batch and the task slice of the current asyncio task from the headers of a request."""
    if _recorder is None:
        return
    BATCH.set(headers.get(BATCH_HEADER))
    task, _, first_run = headers.get(TASK_HEADER, "").partition(".")
    TASK.set((int(task), int(first_run)) if task.isdecimal() and first_run.isdecimal() else None)


def record(
    what: str,
    start: float,
    end: float,
    *,
    batch: int | str | None = None,
    version: tuple[int, int] | None = None,
    wait: bool = False,
    cpu: float | None = None,
    count: int = 1,
    size: int = 0,
    attributes: Attributes | None = None,
    task: tuple[int, int] | None = None,
) -> None:
    """Record a span from ``start`` to ``end``, in seconds of the monotonic clock, for ``batch`` or the current batch.
    The span is skipped if it has no batch and no ``version``, or if its batch is not recorded. ``version`` is the
    weight version that is being synced. ``task`` is the id and first run of the span's task slice (default: the current
    slice).
    """
    if (recorder := _recorder) is None:
        return
    version_text = None if version is None else f"{version[0]}.{version[1]}"
    if batch is None:
        batch = current_batch()
    if batch is None and version_text is not None:
        batch = weights_batch(version_text)
    if batch is None or recorder.leaves_out(batch):
        return
    if task is None:
        task = TASK.get()
    microseconds = (int(1e6 * start), int(1e6 * end), None if cpu is None else int(1e6 * cpu))
    optional = () if task is None and attributes is None else (task, attributes)
    recorder.add((what, batch, version_text, *microseconds, count, size, wait, *optional), end)


class span:  # noqa: N801  # used as a function
    """Record the ``with`` block as a span of ``batch`` or of the current batch.

    Args:
        what: A verb and its object.
        batch: Batch of the span. Can also be set inside the block, like ``size`` and ``count``.
        wait: True if the block waits for others. Otherwise the processor time of the thread is recorded too.
        threads: True if other threads do the work. The processor time is then the time of the whole process.
        size: Number of bytes that the work concerns.
        version: As in :func:`record`.
        attributes: Attributes of the span, by their names in OpenTelemetry's conventions.
    """

    __slots__ = ("_cpu", "_start", "attributes", "batch", "count", "size", "threads", "version", "wait", "what")

    def __init__(
        self,
        what: str,
        batch: int | str | None = None,
        *,
        wait: bool = False,
        threads: bool = False,
        size: int = 0,
        count: int = 1,
        version: tuple[int, int] | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.attributes = attributes
        self.what, self.batch, self.wait, self.threads = what, batch, wait, threads
        self.size, self.count, self.version = size, count, version

    def __enter__(self) -> Self:
        if _recorder is not None:
            self._start = time.monotonic()
            self._cpu = self._processor_seconds()
        else:
            self._start = 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _recorder is None or not self._start:
            return
        cpu = None if self.wait else self._processor_seconds() - self._cpu
        record(
            self.what,
            self._start,
            time.monotonic(),
            batch=self.batch,
            version=self.version,
            wait=self.wait,
            cpu=cpu,
            count=self.count,
            size=self.size,
            attributes=self.attributes,
        )

    def parent_header(self) -> dict[str, str]:
        """Return the ``traceparent`` header for work below this span, for the current batch and task. Call it inside
        the block. The mapping is empty if nothing is traced or no batch is set.
        """
        if (recorder := _recorder) is None or not self._start or (batch := batch_at_work()) is None:
            return {}
        trace, sampled = recorder.trace(batch)
        span_id = recorded_span(trace, recorder.agent, self.what, TASK.get(), int(1e6 * self._start))
        return {TRACEPARENT: traceparent(trace, span_id, sampled=sampled)}

    def _processor_seconds(self) -> float:
        if self.wait:
            return 0.0
        return time.process_time() if self.threads else time.thread_time()


@contextmanager
def shared_span(what: str, shares: Mapping[int | str | None, int]) -> Iterator[None]:
    """Record the block as a span of each batch that it serves, with the batch's share of the processor time of the
    process. Work with the key None counts for the current batch, and is skipped if no batch is current.

    Args:
        what: A verb and its object.
        shares: Amount of work by batch, which becomes the ``count`` of the span.
    """
    start, cpu = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        end, cpu = time.monotonic(), time.process_time() - cpu
        total = sum(shares.values()) or 1
        for batch, count in shares.items():
            record(what, start, end, batch=batch, cpu=cpu * count / total, count=count)
