"""Reads the spans in the folder of a run: all spans, or only new spans."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.telemetry.tail import Tail
from trinity_mq.telemetry.trace import TRACE_FOLDER, TraceSpan, weights_batch
from trinity_mq.telemetry.trace_ids import Sampled

READ_BYTES = 1 << 18
"""Maximum bytes of a file that a call of :meth:`TraceTail.read` reads: about 4000 spans. A line has at most 50 kB."""


def read_trace(run_dir: Path) -> list[TraceSpan]:
    """Return the spans in the folder of a run, in no particular order. A line torn by a killed process is skipped."""
    tail = TraceTail(run_dir)
    all_spans: list[TraceSpan] = []
    while (spans := tail.read()) is not None:
        all_spans.extend(spans)
    return all_spans


class TraceTail:
    """Reads spans that were not read yet, including spans of processes that started in the meantime.

    Args:
        run_dir: Folder of the run.
        state: :attr:`state` of an earlier tail, possibly of another process. None: read from the beginning.
        batches: Batches whose spans are read. None: all batches.

    Raises:
        ValueError: The state is invalid. TypeError and AttributeError are raised for the same reason.
    """

    def __init__(
        self, run_dir: Path, state: Mapping[str, Any] | None = None, *, batches: Sampled | None = None
    ) -> None:
        self._folder, self._batches = run_dir / TRACE_FOLDER, batches
        saved = state or {}
        self._clocks: dict[str, float] = {
            str(clock): float(offset) for clock, offset in saved.get("clocks", {}).items()
        }
        """Seconds to add to a clock to get the time of day, by clock id. Processes that share a clock share the
        offset.
        """
        self._files: dict[str, tuple[Tail, dict[str, Any]]] = {
            str(name): (Tail(self._folder / str(name), int(at)), dict(writer))
            for name, (at, writer) in saved.get("files", {}).items()
        }
        """Tail of a file, and the process that wrote the last line read from it, by file name."""

    @property
    def state(self) -> dict[str, Any]:
        """Progress of the reader, as JSON-compatible data."""
        return {
            "clocks": dict(self._clocks),
            "files": {name: [tail.offset, writer] for name, (tail, writer) in self._files.items()},
        }

    def read(self) -> list[TraceSpan] | None:
        """Return new spans, at most a few thousand per process. Return None if no line is new. A line that is still
        being written is returned later. Malformed lines are skipped.
        """
        spans: list[TraceSpan] = []
        moved = False
        for path in sorted(self._folder.glob("*.jsonl")):
            tail, writer = self._files.get(path.name, (Tail(path), {}))
            with contextlib.suppress(OSError):  # the file is not readable
                for line in tail.read(READ_BYTES):
                    writer = self._take(line, writer, spans)
                    moved = True
            self._files[path.name] = tail, writer
        return spans if moved else None

    def _take(self, line: bytes, writer: dict[str, Any], spans: list[TraceSpan]) -> dict[str, Any]:
        """Add the spans of a line to ``spans``. Return the process that wrote the following lines."""
        try:
            fields = json.loads(line)
            if isinstance(fields, dict):
                self._clocks.setdefault(str(fields["clock"]), float(fields["offset"]))
                return {key: str(fields[key]) for key in ("role", "agent", "clock")}
            offset = self._clocks[writer["clock"]]
            batches = self._batches
            if batches is not None:
                fields = [row for row in fields if _batch_of(row) in batches]
            spans.extend([_span(row, writer, offset) for row in fields])
        except (ValueError, TypeError, LookupError):
            pass  # torn by a killed process
        return writer


def _batch_of(fields: Any) -> int | str:
    """Return the batch of a span. Release 0.1.0 wrote no batch for most spans of a weight sync."""
    batch: int | str = weights_batch(fields[2]) if fields[1] is None else fields[1]
    return batch


def _span(fields: Any, writer: Mapping[str, Any], offset: float) -> TraceSpan:
    what, _, version, start, end, cpu, count, size, wait, *more = fields
    task, attributes = more or (None, None)
    return TraceSpan(
        role=writer["role"],
        agent=writer["agent"],
        what=str(what),
        start=start / 1e6 + offset,
        end=end / 1e6 + offset,
        wait=bool(wait),
        cpu=None if cpu is None else cpu / 1e6,
        count=count,
        bytes=size,
        batch=_batch_of(fields),
        version=version,
        task=None if task is None else task[0],
        first_run=None if task is None else task[1],
        ticks=start,
        attributes=attributes,
    )
