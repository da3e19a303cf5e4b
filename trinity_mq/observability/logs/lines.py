"""Log lines: parses, filters and formats them. All functions are pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

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
    """The line as it stands in the file."""
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
