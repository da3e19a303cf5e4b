"""Log files of a run: merges the files of all agents by time, and follows them."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import is_run_over
from trinity_mq.targets.run_folder import LOCK_FILE, LockedFolder
from trinity_mq.telemetry import LOGS_FOLDER
from trinity_mq.telemetry.tail import Tail
from trinity_mq.terminal import escape_to_one_line

LEVELS = ("debug", "info", "warning", "error", "critical")
LONGEST_VALUE = 300
"""Maximum characters shown of a value. ``--json`` shows whole values."""
_SHOWN_APART = {"time", "level", "role", "agent", "run", "pid", "logger", "event", "batch", "ticket", "exception"}
_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """One event that an agent logged."""

    time: float
    """Seconds since the epoch."""
    text: str
    """The unchanged line of the file."""
    fields: dict[str, Any]


def parse(text: str) -> LogLine | None:
    """Return the event in a line of a log file, or None if the line is not an event, for example a partial line of a
    killed agent.
    """
    try:
        fields = json.loads(text)
        seconds = datetime.fromisoformat(fields["time"]).timestamp()
        datetime.fromtimestamp(seconds)  # raises for years that cannot be displayed
        return LogLine(seconds, text, fields)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


@dataclass
class LineFilter:
    """Selects log lines. A line with only a ticket belongs to the batch that an earlier line named with that ticket."""

    batch: str | None = None
    agent: str | None = None
    """Agent id or role."""
    level: str = "debug"
    """Lowest level that is shown."""
    since: float | None = None
    """Earliest time in seconds since the epoch."""
    grep: str | None = None
    """Text that the line must contain, ignoring case."""
    _batches: dict[str, str] = field(default_factory=dict)

    def takes(self, line: LogLine) -> bool:
        """Return whether a line is selected. Call it for every line in time order, because it learns batches from
        tickets.
        """
        fields = line.fields
        batch, ticket = fields.get("batch"), fields.get("ticket")
        if self.batch is not None:
            if batch is not None and ticket is not None:
                if str(batch) == self.batch:
                    self._batches[str(ticket)] = self.batch
            elif batch is None and ticket is not None:
                batch = self._batches.get(str(ticket))
            if str(batch) != self.batch:
                return False
        if self.agent is not None and self.agent not in (fields.get("agent"), fields.get("role")):
            return False
        if _rank(fields.get("level")) < _rank(self.level):
            return False
        if self.since is not None and line.time < self.since:
            return False
        return self.grep is None or self.grep.casefold() in line.text.casefold()


def format_line(line: LogLine, *, colour: bool = False) -> str:
    """Return an event as one line for a person: local time, level, agent, event, batch, then the other fields."""
    fields = line.fields
    level = str(fields.get("level", "info"))
    when = datetime.fromtimestamp(line.time).strftime("%H:%M:%S.%f")[:-3]
    event = escape_to_one_line(str(fields.get("event", "")).replace("_", " "))
    of_batch = [f"batch={_value(fields['batch'])}"] if "batch" in fields else []
    if not of_batch and "ticket" in fields:
        of_batch = [f"ticket={_value(fields['ticket'])}"]
    rest = [f"{escape_to_one_line(key)}={_value(value)}" for key, value in fields.items() if key not in _SHOWN_APART]
    if error := str(fields.get("exception") or "").strip():
        rest.append(f"error={_value(error.splitlines()[-1])}")
    agent = escape_to_one_line(str(fields.get("agent", "?")))
    text = " ".join([f"{when} {escape_to_one_line(level):7} {agent:12}", event, *of_batch, *rest])
    code = _COLOURS.get(level)
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text


def _rank(level: object) -> int:
    return LEVELS.index(level) if isinstance(level, str) and level in LEVELS else LEVELS.index("info")


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 3]}..."
    if isinstance(value, str) and (
        not text or any(character.isspace() or not character.isprintable() or character in "\"'=" for character in text)
    ):
        return escape_to_one_line(json.dumps(text, ensure_ascii=False))
    return escape_to_one_line(text)


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
    """Return the moment that lies an age such as ``10m`` before now, in seconds since the epoch, or None for None. An
    age without a unit is in seconds.

    Raises:
        CommandError: The text is not an age.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise CommandError(f"--since is {text!r}, wanted a number and s, m, h or d, such as 10m")
    return now() - float(match[1]) * UNITS[match[2] or "s"]
