"""Log files of a run: merges those of all agents by time, and reads what is appended to them."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.cli.logs.lines import LogLine, parse
from trinity_mq.telemetry import LOGS_FOLDER

CHUNK = 1024 * 1024
"""Most bytes that are read of a file before the others have their turn; a longer line is passed over."""


@dataclass(slots=True)
class _Place:
    """A place in a file."""

    offset: int = 0


class LogFiles:
    """The log files of a run, each read once from its beginning; files may appear, grow, shrink, be renamed and be
    replaced.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / LOGS_FOLDER
        self._places: dict[int, _Place] = {}
        """By inode: a file that is full goes on under another name."""

    def merged(self) -> Iterator[LogLine]:
        """Yield all lines that are there now in the order of time, of each file a line at a time.

        A file in which a clock went back is passed on as it is.
        """
        found = self._sizes()
        yield from heapq.merge(
            *(self._lines(path, inode, size) for path, inode, size in found), key=lambda line: line.time
        )

    def appended(self) -> tuple[list[LogLine], bool]:
        """Return the lines that were added since, in the order of time, and whether there may be more already."""
        found: list[LogLine] = []
        more = False
        sizes = self._sizes()
        there = {inode for _, inode, _ in sizes}
        self._places = {inode: place for inode, place in self._places.items() if inode in there}
        for path, inode, size in sizes:
            place = self._places.setdefault(inode, _Place())
            if size < place.offset:
                place.offset = 0
            lines, full = _read(path, place)
            found += _parsed(lines)
            more |= full
        return sorted(found, key=lambda line: line.time), more

    def _sizes(self) -> list[tuple[Path, int, int]]:
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                status = path.stat()
            except OSError:  # moved away since it was listed
                continue
            found.append((path, status.st_ino, status.st_size))
        return found

    def _lines(self, path: Path, inode: int, end: int) -> Iterator[LogLine]:
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != inode:  # renamed since it was listed, and is listed there
                    return
                self._places[inode] = place = _Place()
                while place.offset < end and (line := file.readline(CHUNK)):
                    if not line.endswith(b"\n") and len(line) < CHUNK:
                        return  # still being written
                    place.offset += len(line)
                    yield from _parsed([line])
        except OSError:  # moved away
            return


def _read(path: Path, place: _Place) -> tuple[list[bytes], bool]:
    """Return the next whole lines, and whether there may be more."""
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            read = file.read(CHUNK)
    except OSError:
        return [], False
    whole, newline, _ = read.rpartition(b"\n")
    if not newline and len(read) == CHUNK:  # a line without an end
        place.offset += len(read)
        return [], True
    place.offset += len(whole) + len(newline)
    return whole.split(b"\n") if newline else [], len(read) == CHUNK


def _parsed(lines: Iterable[bytes]) -> Iterator[LogLine]:
    for line in lines:
        found = parse(line.decode(errors="replace").rstrip("\n"))
        if found is not None:
            yield found
