"""Follows the log files of a run."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.observability.logs.files import LogFiles
from trinity_mq.observability.logs.lines import LineFilter, LogLine
from trinity_mq.runtime.process import is_run_over
from trinity_mq.targets.run_folder import LOCK_FILE, LockedFolder

POLL_SECONDS = 0.25
"""Poll interval of followed files in seconds. Agents do not signal new lines."""
QUIET_ROUNDS = 4
"""Consecutive polls without a new line after which the log of a finished run counts as read to its end."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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
