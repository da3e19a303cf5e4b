"""``trinity-mq list``: lists the runs below a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.observability.run_list import COLUMNS, ago, find_runs, row
from trinity_mq.targets.target import RUNS
from trinity_mq.terminal import align_columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq list``."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=str(RUNS), help=f"default: {RUNS}")


def list_runs(arguments: argparse.Namespace) -> int:
    """Print a table of the runs below a folder. Return 0, or 1 without any run."""
    top = Path(arguments.folder)
    if not top.is_dir() and arguments.folder != str(RUNS):
        raise CommandError(f"{top} is not a folder; give a folder that holds run folders, such as {RUNS}")
    folders = find_runs(top)
    if not folders:
        print(f"no run has left a folder below {top.absolute()}", file=sys.stderr)
        return 1
    rows = [(row(folder), folder) for folder in folders]
    table = [
        (run.name, run.state, run.step, run.accuracy, run.reward, ago(run.age), str(folder)) for run, folder in rows
    ]
    for line in align_columns([COLUMNS, *table]):
        print(line)
    return 0
