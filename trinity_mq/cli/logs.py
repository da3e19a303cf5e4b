"""``trinity-mq logs``: shows the log lines of a run's agents in time order, and follows new lines."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque

from trinity_mq.cli.arguments import add_target, check_least
from trinity_mq.observability.logs.files import LEVELS, LineFilter, LogFiles, LogLine, follow, format_line, since
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.target import find_run_folder
from trinity_mq.telemetry import LOGS_FOLDER
from trinity_mq.terminal import unguarded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq logs``."""
    add_target(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="follow new lines until the run is over")
    parser.add_argument("--batch", metavar="N", help="only lines about this batch")
    parser.add_argument("--agent", metavar="ID", help="only lines of this agent, or of all agents of this role")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="minimum level (default: all levels)")
    parser.add_argument("--since", metavar="AGE", help="only lines up to this age, such as 90s, 10m, 2h or 1d")
    parser.add_argument("--grep", metavar="TEXT", help="only lines that contain this text, ignoring case")
    parser.add_argument("--lines", metavar="N", type=int, help="only the last N of the existing lines")
    parser.add_argument("--json", action="store_true", help="print the lines unchanged, as in the files")


def logs(arguments: argparse.Namespace) -> int:
    """Print the selected log lines, and follow new lines with ``--follow``. Return 0, or 1 if no log exists and
    ``--follow`` is not given.
    """
    folder = find_run_folder(arguments)
    check_least(arguments, lines=0)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    chosen = LineFilter(arguments.batch, arguments.agent, arguments.level, since(arguments.since), arguments.grep)

    def show(line: LogLine) -> None:
        if arguments.json:
            print(line.text)
        else:
            print(
                format_line(line, colour=colour), file=unguarded(sys.stdout)
            )  # the line contains our own colour codes

    if not arguments.follow and not (folder / LOGS_FOLDER).is_dir():
        print(
            f"{folder / LOGS_FOLDER} does not exist: no agent of this run has started on this machine", file=sys.stderr
        )
        return 1
    files = LogFiles(folder)
    matches = (line for line in files.merged() if chosen.takes(line))
    for line in matches if arguments.lines is None else deque(matches, maxlen=arguments.lines):
        show(line)
    if arguments.follow:
        sys.stdout.flush()
        run_until_complete(follow(folder, files, chosen, show))
    return 0
