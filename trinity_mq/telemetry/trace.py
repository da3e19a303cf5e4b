"""The trace of each batch: what every process did for it and when, in ``<run_dir>/trace/<agent>.jsonl``.

Written where ``monitor.trace`` is on, of the batches that are exported where ``monitor.otlp`` is; else a span costs a
look at one variable. Times are of the monotonic clock, which
the processes of a host share; each process also says how far that clock is from the time of day, which compares hosts
as well as their clocks are set (NTP: about a millisecond).
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
"""Header of a request to an engine while traced: the batch that it is for."""
TASK_HEADER = "X-TMQ-Task"
"""Header of a request to an engine while traced: id and first run of the task that it is for, as ``3.0``."""
BUFFERED = 512
"""Spans after which they are written."""
FLUSH_SECONDS = 1.0
"""Seconds after which the next span has those before it written too."""

BATCH: ContextVar[int | str | None] = ContextVar("batch", default=None)
"""The batch that the present task works for, where a process works for several at a time."""
TASK: ContextVar[tuple[int, int] | None] = ContextVar("task", default=None)
"""Id and first run of the slice of a task of that batch that the present task works for."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span: one piece of work or one wait of a process."""

    role: str
    agent: str
    what: str
    start: float
    """Seconds since the epoch; differences of spans of one host are those of its monotonic clock."""
    end: float
    wait: bool = False
    """It waited for somebody else, or for its turn."""
    cpu: float | None = None
    """Processor seconds of the thread that did it, of the whole process where several threads did; None for waits."""
    count: int = 1
    bytes: int = 0
    batch: int | str | None = None
    version: str | None = None
    """``generation.step`` of the weights that were synced; a span of the trainer says which batch they come from."""
    task: int | None = None
    """Id of the task within the batch, where it is for one."""
    first_run: int | None = None
    """First run of the slice of the task."""
    ticks: int = 0
    """Start in microseconds of the process's own monotonic clock."""
    attributes: Mapping[str, str | int | float] | None = None
    """Further ones, by their names in OpenTelemetry's conventions."""


Attributes = dict[str, str | int | float]
Line = tuple[
    str,
    int | str | None,
    str | None,
    float,
    float,
    float | None,
    int,
    int,
    bool,
    tuple[int, int] | None,
    Attributes | None,
]
"""A span on its way to the file: what, batch, version, start, end, processor seconds, count, bytes, whether it waited,
its slice of a task, attributes. There its seconds are whole microseconds, and the last two are missing where it has
none.
"""


class _Recorder:
    """The spans of this process, which are written some at a time: first who it is, then lines of many spans each."""

    def __init__(self, role: str, agent: str, run_dir: Path, sample: float, *, exported_only: bool) -> None:
        folder = run_dir / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.agent, self._sampled, self._exported_only = agent, Sampled(trace_key(folder), sample), exported_only
        self._file = os.open(folder / f"{agent}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._flushed = time.monotonic()
        self._spans: list[Line] = []
        offset = time.time() - self._flushed
        who = {"role": role, "agent": agent, "clock": _clock(), "pid": os.getpid(), "offset": offset}
        self._write(f"\n{json.dumps(who)}\n")  # a line that a killed process left torn ends here

    def add(self, line: Line, now: float) -> None:
        with self._lock:
            self._spans.append(line)
            if len(self._spans) < BUFFERED and now - self._flushed < FLUSH_SECONDS:
                return
            self._flushed = now
        self.flush()

    def flush(self) -> None:
        with self._lock:
            lines, self._spans = self._spans, []
        if lines:
            # of whole numbers, as one text: three times as fast as an object a span
            found = [
                (
                    what,
                    batch,
                    version,
                    int(1e6 * start),
                    int(1e6 * end),
                    None if cpu is None else int(1e6 * cpu),
                    count,
                    size,
                    wait,
                    *(() if task is None and more is None else (task, more)),
                )
                for what, batch, version, start, end, cpu, count, size, wait, task, more in lines
            ]
            self._write(json.dumps(found, separators=(",", ":")) + "\n")

    def trace(self, batch: int | str) -> tuple[str, bool]:
        """Return the id of a batch's trace, and whether that is exported."""
        found = trace_id(self._sampled.key, batch)
        return found, batch in self._sampled

    def leaves_out(self, batch: int | str) -> bool:
        """Say whether nobody will look at the spans of a batch."""
        return self._exported_only and batch not in self._sampled

    def _write(self, text: str) -> None:
        try:
            os.write(self._file, text.encode())
        except OSError:  # a full disk ends the trace, not the agent
            stop_trace()


def _clock() -> str:
    """Return which monotonic clock this is: that of one boot of a host, its containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


_recorder: _Recorder | None = None
_at_work: int | str | None = None


def start_trace(
    role: str, agent: str, run_dir: Path, *, on: bool, sample: float = 1.0, exported_only: bool = False
) -> None:
    """Record the spans of this process from now on, or none.

    Args:
        role: Of the process.
        agent: Its id.
        run_dir: The run's folder.
        on: Record them.
        sample: Share of the batches whose traces are exported, for the flag in ``traceparent``.
        exported_only: Record the spans of these batches only, and those of versions.
    """
    global _recorder  # noqa: PLW0603  # as logging, a process has one
    stop_trace()
    if on:
        _recorder = _Recorder(role, agent, run_dir, sample, exported_only=exported_only)


def stop_trace() -> None:
    """Record no more."""
    global _recorder  # noqa: PLW0603
    _recorder = None


@atexit.register
def flush_trace() -> None:
    """Write what is buffered: at times, for those who follow, and in processes that end without their ``atexit``."""
    if _recorder is not None:
        _recorder.flush()


def works_on(batch: int | str | None) -> None:
    """Say which batch this process works for until the next call, where that is one at a time."""
    global _at_work  # noqa: PLW0603
    _at_work = batch


def batch_at_work() -> int | str | None:
    """Return the batch that the present task, else this process, works for; None where it is not recorded."""
    if (recorder := _recorder) is None:
        return None
    if (batch := BATCH.get()) is None:
        batch = _at_work
    return None if batch is None or recorder.leaves_out(batch) else batch


def trace_headers() -> dict[str, str]:
    """Return the headers that tell an engine which batch and task a request is for, none where that is not recorded."""
    if (batch := batch_at_work()) is None:
        return {}
    found = {BATCH_HEADER: str(batch), **parent_header(batch)}
    if (task := TASK.get()) is not None:
        found[TASK_HEADER] = f"{task[0]}.{task[1]}"
    return found


def parent_header(batch: int | str | None = None, task: int | None = None) -> dict[str, str]:
    """Return the header ``traceparent`` of a batch, by default of that at work, and of a task of it: what gets it works
    below the span of the task, else of the batch. None where there is no batch, or it is not recorded.
    """
    if (recorder := _recorder) is None:
        return {}
    if batch is None:
        batch = batch_at_work()
    if batch is None or recorder.leaves_out(batch):
        return {}
    if task is None and (own := TASK.get()) is not None:
        task = own[0]
    trace, sampled = recorder.trace(batch)
    span_id = batch_span(trace) if task is None else task_span(trace, task)
    return {TRACEPARENT: traceparent(trace, span_id, sampled=sampled)}


def works_for(headers: Mapping[str, str]) -> None:
    """Have the present task work for the batch and the task that a request's headers name."""
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
    """Record a span from ``start`` to ``end``, in seconds of the monotonic clock, of ``batch`` or of the batch at work;
    of neither and of no ``version``, it is passed over. ``task`` are id and first run of its slice, by default of that
    at work.
    """
    if (recorder := _recorder) is None:
        return
    if batch is None and version is None:
        batch = batch_at_work()
    if version is None and (batch is None or recorder.leaves_out(batch)):
        return
    of = None if version is None else f"{version[0]}.{version[1]}"
    if task is None and batch is not None:
        task = TASK.get()
    recorder.add((what, batch, of, start, end, cpu, count, size, wait, task, attributes), end)


class span:  # noqa: N801  # used as a function
    """Record what the ``with`` block does as a span of ``batch``, or of the batch at work.

    Args:
        what: A verb and its object.
        batch: Can also be set inside the block, as ``size`` and ``count``.
        wait: The block waits for others; without it the processor time of the thread is recorded too.
        threads: Other threads do the work: the processor time is that of the whole process.
        size: Bytes that it is about.
        version: As in :func:`record`.
        attributes: Of the span, by their names in OpenTelemetry's conventions.
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
        """Return the header ``traceparent`` of what works below this span, of the batch and task at work; inside the
        block. None where nothing is traced, or there is no batch.
        """
        if (recorder := _recorder) is None or not self._start or (batch := batch_at_work()) is None:
            return {}
        trace, sampled = recorder.trace(batch)
        own = recorded_span(trace, recorder.agent, self.what, TASK.get(), int(1e6 * self._start))
        return {TRACEPARENT: traceparent(trace, own, sampled=sampled)}

    def _processor_seconds(self) -> float:
        if self.wait:
            return 0.0
        return time.process_time() if self.threads else time.thread_time()


@contextmanager
def shared_span(what: str, shares: Mapping[int | str | None, int]) -> Iterator[None]:
    """Record what the block does as one span of each batch that it serves, with its share of the process's processor
    time; work for no batch is passed over.

    Args:
        what: A verb and its object.
        shares: By batch, how much of the work is for it, as the span's ``count``.
    """
    start, cpu = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        end, cpu = time.monotonic(), time.process_time() - cpu
        of_all = sum(shares.values()) or 1
        for batch, count in shares.items():
            record(what, start, end, batch=batch, cpu=cpu * count / of_all, count=count)
