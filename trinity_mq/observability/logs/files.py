"""Log files of a run: merges the files of all agents by time and reads appended lines."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.observability.logs.lines import LogLine, parse
from trinity_mq.telemetry import LOGS_FOLDER

CHUNK = 1024 * 1024
"""Maximum bytes read from a file before the next file is read. A longer line is skipped."""


@dataclass(slots=True)
class _Position:
    """Read position in a file, in bytes."""

    offset: int = 0


class LogFiles:
    """The log files of a run, each read once from its beginning. Files may appear, grow, shrink, be renamed and be
    replaced.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / LOGS_FOLDER
        self._positions: dict[int, _Position] = {}
        """Read positions by inode, because a rotated file keeps its inode under a new name."""

    def merged(self) -> Iterator[LogLine]:
        """Yield all current lines in time order, reading one line of each file at a time.

        Lines of a file whose clock was set back stay in file order.
        """
        sizes = self._sizes()
        yield from heapq.merge(
            *(self._lines(path, inode, size) for path, inode, size in sizes), key=lambda line: line.time
        )

    def read_appended(self) -> tuple[list[LogLine], bool]:
        """Return (the lines appended since the last read in time order, whether more lines may be available)."""
        new_lines: list[LogLine] = []
        more = False
        sizes = self._sizes()
        present = {inode for _, inode, _ in sizes}
        self._positions = {inode: place for inode, place in self._positions.items() if inode in present}
        for path, inode, size in sizes:
            place = self._positions.setdefault(inode, _Position())
            if size < place.offset:
                place.offset = 0
            lines, full = _read(path, place)
            new_lines += _parsed(lines)
            more |= full
        return sorted(new_lines, key=lambda line: line.time), more

    def _sizes(self) -> list[tuple[Path, int, int]]:
        sizes = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                status = path.stat()
            except OSError:  # renamed or deleted after the listing
                continue
            sizes.append((path, status.st_ino, status.st_size))
        return sizes

    def _lines(self, path: Path, inode: int, end: int) -> Iterator[LogLine]:
        try:
            with path.open("rb") as file:
                # a renamed file is skipped here: the listing contains its inode under the new name
                if os.fstat(file.fileno()).st_ino != inode:
                    return
                self._positions[inode] = place = _Position()
                while place.offset < end and (line := file.readline(CHUNK)):
                    if not line.endswith(b"\n") and len(line) < CHUNK:
                        return  # the line is still being written
                    place.offset += len(line)
                    yield from _parsed([line])
        except OSError:  # renamed or deleted after the listing
            return


def _read(path: Path, place: _Position) -> tuple[list[bytes], bool]:
    """Return (the next complete lines, whether more data may follow)."""
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            read = file.read(CHUNK)
    except OSError:
        return [], False
    whole, newline, _ = read.rpartition(b"\n")
    if not newline and len(read) == CHUNK:  # a line longer than CHUNK is skipped
        place.offset += len(read)
        return [], True
    place.offset += len(whole) + len(newline)
    return whole.split(b"\n") if newline else [], len(read) == CHUNK


def _parsed(lines: Iterable[bytes]) -> Iterator[LogLine]:
    for line in lines:
        event = parse(line.decode(errors="replace").rstrip("\n"))
        if event is not None:
            yield event
