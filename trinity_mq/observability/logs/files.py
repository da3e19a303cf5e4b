"""Log files of a run: merges the files of all agents by time, and follows them."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.observability.logs.lines import LineFilter, LogLine, parse
from trinity_mq.runtime.process import is_run_over
from trinity_mq.targets.run_folder import LOCK_FILE, LockedFolder
from trinity_mq.telemetry import LOGS_FOLDER
from trinity_mq.telemetry.tail import Tail

CHUNK = 1024 * 1024
"""Number of bytes read from a file before the next file is read."""
POLL_SECONDS = 0.25
"""Poll interval of followed files in seconds. Agents do not signal new lines."""
QUIET_ROUNDS = 4
"""Consecutive polls without a new line after which the log of a finished run counts as read to its end."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class LogFiles:
    """The log files of a run, each read once from its beginning. Files may appear, grow, shrink, be renamed and be
    replaced.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / LOGS_FOLDER
        self._tails: dict[int, Tail] = {}
        """Tails by inode, because a rotated file keeps its inode under a new name."""

    def merged(self) -> Iterator[LogLine]:
        """Yield all current lines in time order, reading one line of each file at a time.

        Lines of a file whose clock was set back stay in file order.
        """
        yield from heapq.merge(*(_events(tail) for tail in self._update_tails()), key=_time)

    def read_appended(self) -> tuple[list[LogLine], bool]:
        """Return (the lines appended since the last read in time order, whether more lines may be available)."""
        tails = self._update_tails()
        new_lines = [line for tail in tails for line in _events(tail, CHUNK)]
        return sorted(new_lines, key=_time), not all(tail.caught_up for tail in tails)

    def _update_tails(self) -> Collection[Tail]:
        """Return the tails of the files that exist now, under their current names."""
        tails = {}
        for path in sorted(self._folder.glob("*.jsonl")):
            with contextlib.suppress(OSError):  # renamed or deleted after the listing
                inode = path.stat().st_ino
                tails[inode] = tail = self._tails.get(inode) or Tail(path, inode=inode)
                tail.path = path
        self._tails = tails
        return tails.values()


def _events(tail: Tail, max_bytes: int = sys.maxsize) -> Iterator[LogLine]:
    with contextlib.suppress(OSError):  # the file is not readable
        for line in tail.read(max_bytes):
            event = parse(line.decode(errors="replace").rstrip("\n"))
            if event is not None:
                yield event


def _time(line: LogLine) -> float:
    return line.time


async def follow(folder: Path, files: LogFiles, chosen: LineFilter, show: Callable[[LogLine], None]) -> None:
    """Show new lines until the run has finished and its log has been read to the end."""
    lock, quiet = LockedFolder(folder, LOCK_FILE, ""), 0
    while quiet < QUIET_ROUNDS:
        over = is_run_over(folder) and lock.holder() is None  # checked before the last read, so that no line is missed
        lines, more = files.read_appended()
        for line in lines:
            if chosen.takes(line):
                show(line)
        sys.stdout.flush()
        quiet = quiet + 1 if over and not lines else 0
        if not more:
            await asyncio.sleep(POLL_SECONDS)


def since(text: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Return the time of an age such as ``10m``, in seconds since the epoch, or None for None.

    Raises:
        CommandError: The text is not an age.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise CommandError(f"--since is {text!r}, wanted a number and s, m, h or d, such as 10m")
    return now() - float(match[1]) * UNITS[match[2] or "s"]
