"""Reads the spans in a run's folder: all at once, or those that are new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.telemetry.trace import TRACE_FOLDER, TraceSpan
from trinity_mq.telemetry.trace_ids import Sampled

READ_BYTES = 1 << 18
"""Most bytes of one file that a call of :meth:`TraceTail.read` takes: about 4000 spans. A line has at most 50 kB."""


def read_trace(run_dir: Path) -> list[TraceSpan]:
    """Return the spans in a run's folder, in no order; a line torn by a killed process is left out."""
    tail = TraceTail(run_dir)
    found: list[TraceSpan] = []
    while (spans := tail.read()) is not None:
        found.extend(spans)
    return found


class TraceTail:
    """The spans that were not read yet, also those of processes that started meanwhile.

    Args:
        run_dir: The run's folder.
        state: :attr:`state` of an earlier tail, perhaps of another process; None: read from the beginning.
        batches: Those whose spans are read, with those of versions; None: all.

    Raises:
        ValueError: The state is none; TypeError and AttributeError likewise.
    """

    def __init__(
        self, run_dir: Path, state: Mapping[str, Any] | None = None, *, batches: Sampled | None = None
    ) -> None:
        self._folder, self._batches = run_dir / TRACE_FOLDER, batches
        known = state or {}
        self._clocks: dict[str, float] = {str(one): float(offset) for one, offset in known.get("clocks", {}).items()}
        """By clock: seconds from it to the time of day, the same for all processes that share it."""
        self._files: dict[str, tuple[int, dict[str, Any]]] = {
            str(name): (int(at), dict(who)) for name, (at, who) in known.get("files", {}).items()
        }
        """By file: the offset that it is read up to, and the process that wrote there last."""

    @property
    def state(self) -> dict[str, Any]:
        """The progress of the reader, as JSON takes it."""
        return {"clocks": dict(self._clocks), "files": {name: [at, who] for name, (at, who) in self._files.items()}}

    def read(self) -> list[TraceSpan] | None:
        """Return new spans, at most some thousand of each process; None: no line is new. A line that is still being
        written comes later; one that cannot be understood is passed over.
        """
        found: list[TraceSpan] = []
        moved = False
        for path in sorted(self._folder.glob("*.jsonl")):
            at, who = self._files.get(path.name, (0, {}))
            lines = _whole_lines(path, at)
            for line in lines:
                at += len(line)
                who = self._take(line, who, found)
            if lines:
                self._files[path.name] = at, who
                moved = True
        return found if moved else None

    def _take(self, line: bytes, who: dict[str, Any], found: list[TraceSpan]) -> dict[str, Any]:
        """Add the spans of a line, which a process wrote; return the process that writes from here on."""
        try:
            fields = json.loads(line)
            if isinstance(fields, dict):
                self._clocks.setdefault(str(fields["clock"]), float(fields["offset"]))
                return {key: str(fields[key]) for key in ("role", "agent", "clock")}
            offset = self._clocks[who["clock"]]
            batches = self._batches
            if batches is not None:
                fields = [one for one in fields if one[1] in batches or one[2] is not None]
            found.extend([_span(one, who, offset) for one in fields])
        except (ValueError, TypeError, LookupError):
            pass  # torn by a process that was killed
        return who


def _span(fields: Any, who: Mapping[str, Any], offset: float) -> TraceSpan:
    what, batch, version, start, end, cpu, count, size, wait, *more = fields
    task, attributes = more or (None, None)
    return TraceSpan(
        role=who["role"],
        agent=who["agent"],
        what=str(what),
        start=start / 1e6 + offset,
        end=end / 1e6 + offset,
        wait=bool(wait),
        cpu=None if cpu is None else cpu / 1e6,
        count=count,
        bytes=size,
        batch=batch,
        version=version,
        task=None if task is None else task[0],
        first_run=None if task is None else task[1],
        ticks=start,
        attributes=attributes,
    )


def _whole_lines(path: Path, at: int) -> list[bytes]:
    """Return whole lines from an offset on, with their ends."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            read = file.read(READ_BYTES)
    except OSError:  # moved aside with its run
        return []
    whole, newline, _ = read.rpartition(b"\n")
    if not newline:
        return [read] if len(read) == READ_BYTES else []  # no line of ours is as long: rubbish
    return (whole + newline).splitlines(keepends=True)
