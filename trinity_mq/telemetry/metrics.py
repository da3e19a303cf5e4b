"""Metrics of a run: one JSON object per line in ``<run_dir>/metrics.jsonl``, and TensorBoard files next to it."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_mq.telemetry.jsonline import dump_line, parse_line

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
LINE_FIELDS = ("time", "role", "agent", "step")
"""Fields of a line that give its time and origin. All other fields are metrics."""
TENSORBOARD_FLUSH_SECONDS = 5


class MetricsWriter:
    """Appends an agent's metrics to the metrics file, which all agents of a run share, and to TensorBoard files."""

    def __init__(self, run_dir: Path, role: str, agent_id: str, tensorboard: bool = True) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._whose = {"role": role, "agent": agent_id}
        self._path = run_dir / METRICS_FILE
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._end_torn_line()
        self._events: EventFileWriter | None = _event_files(run_dir / "tensorboard" / role) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append ``values`` with the number ``step`` in a single write, so that lines of several agents never mix. The
        number orders the lines of a role; for most roles it is the number of a batch, not of a train step.

        Values that are not finite are written as null, and are omitted from TensorBoard. A metric named ``time``,
        ``role``, ``agent`` or ``step`` is hidden by the field of the same name.

        Raises:
            OSError: The disk is full, or the file no longer exists.
        """
        now = time.time()
        numbers = {name: _number(value) for name, value in values.items()}
        line = numbers | {"time": round(now, 3), **self._whose, "step": step}
        first = {key: line[key] for key in LINE_FIELDS}
        data = (dump_line(first | line) + "\n").encode()
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if written != len(data):
            reason = f"only {written} of {len(data)} bytes could be written"
            raise OSError(errno.ENOSPC, reason, str(self._path))
        if self._events is not None:
            _add_scalars(self._events, now, step, numbers)

    def close(self) -> None:
        """Write buffered data and close the files."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._events is not None:
            self._events.close()
            self._events = None

    def _end_torn_line(self) -> None:
        """Terminate a line that a killed process left unfinished, so that the next line does not continue it.

        A line that another agent is writing at this moment looks the same, and is then followed by a blank line. A lock
        would distinguish the two cases, but a frozen agent could block all other agents.
        """
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, oldest first.

    Blank lines and lines torn by a killed writer are skipped. A missing file has no lines.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    # only line feeds end a line: names may contain the other line breaks of splitlines()
    return [fields for line in text.split("\n") if (fields := parse_line(line)) is not None]


def _number(value: Any) -> float | int:
    """Return a plain number. Torch and numpy scalars are converted."""
    return value if type(value) in {int, float} else float(value)


def _event_files(folder: Path) -> EventFileWriter:
    # imported here because tensorboard takes a third of a second to import, and only writers need it
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(folder), flush_secs=TENSORBOARD_FLUSH_SECONDS)


def _add_scalars(events: EventFileWriter, now: float, step: int, values: Mapping[str, float | int]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if math.isfinite(value)]
    if scalars:
        events.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
