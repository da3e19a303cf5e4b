"""``trinity-mq logs``: shows the log lines of a run's agents in time order, and follows new lines."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.logs.files import LogFiles
from trinity_mq.cli.logs.lines import LEVELS, LineFilter, LogLine, in_words
from trinity_mq.cli.output import unguarded
from trinity_mq.cli.run_folder import LOCK_FILE, LockedFolder
from trinity_mq.cli.target import RUNS, find_configuration, known_runs
from trinity_mq.runtime.process import is_run_over
from trinity_mq.telemetry import LOGS_FOLDER

POLL_SECONDS = 0.25
"""Poll interval of followed files in seconds. Agents do not signal new lines."""
QUIET_ROUNDS = 4
"""Consecutive polls without a new line after which the log of a finished run counts as read to its end."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq logs``."""
    add_target(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on with new lines, until the run is over")
    parser.add_argument("--batch", metavar="N", help="only lines about this batch")
    parser.add_argument("--agent", metavar="ID", help="only lines of this agent, or of all agents of this role")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="least level (default: all that is written)")
    parser.add_argument("--since", metavar="AGE", help="only lines that are not older, such as 90s, 10m, 2h or 1d")
    parser.add_argument("--grep", metavar="TEXT", help="only lines that contain this, in capitals or not")
    parser.add_argument("--lines", metavar="N", type=int, help="only the last N of the lines that are there")
    parser.add_argument("--json", action="store_true", help="lines as they are in the files")


def logs(arguments: argparse.Namespace) -> int:
    """Print the lines. Return 0, or 1 if no log exists and ``--follow`` is not given."""
    folder = _run_folder(arguments)
    if arguments.lines is not None and arguments.lines < 0:
        raise CommandError(f"--lines is {arguments.lines}, wanted 0 or more")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    chosen = LineFilter(arguments.batch, arguments.agent, arguments.level, since(arguments.since), arguments.grep)

    def show(line: LogLine) -> None:
        if arguments.json:
            print(line.text)
        else:
            print(in_words(line, colour=colour), file=unguarded(sys.stdout))  # the line contains our own colour codes

    if not arguments.follow and not (folder / LOGS_FOLDER).is_dir():
        print(f"{folder / LOGS_FOLDER} is not there: no agent of this run has started on this machine", file=sys.stderr)
        return 1
    files = LogFiles(folder)
    matches = (line for line in files.merged() if chosen.takes(line))
    for line in matches if arguments.lines is None else deque(matches, maxlen=arguments.lines):
        show(line)
    if arguments.follow:
        sys.stdout.flush()
        run_to_the_end(follow(folder, files, chosen, show))
    return 0


async def follow(folder: Path, files: LogFiles, chosen: LineFilter, show: Callable[[LogLine], None]) -> None:
    """Show new lines until the run has finished and its log has been read to the end."""
    lock, quiet = LockedFolder(folder, LOCK_FILE, ""), 0
    while quiet < QUIET_ROUNDS:
        over = is_run_over(folder) and lock.holder() is None  # checked before the last read, so that no line is missed
        lines, more = files.appended()
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


def _run_folder(arguments: argparse.Namespace) -> Path:
    path = Path(arguments.target)
    if (path / LOGS_FOLDER).is_dir():  # agents started without ``trinity-mq run`` write no configuration
        return path
    config = find_configuration(arguments.target, arguments.overrides)
    if config is not None:
        return config.path
    folder = RUNS / str(arguments.target)
    if folder.is_dir():
        return folder
    raise CommandError(f"{arguments.target!r} is no run of which a folder is known here{known_runs()}")
