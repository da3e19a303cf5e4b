"""``trinity-mq timeline``: writes a run's timeline as a Chrome trace from the metrics in its folder, or prints one
batch of its trace, or the medians of several batches, as a waterfall.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.errors import CommandError
from trinity_mq.observability.timeline import TIMELINE_FILE, write_timeline
from trinity_mq.observability.waterfall import as_json, as_text, batch_waterfall
from trinity_mq.targets.target import find_run_folder, run_list_suffix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq timeline``."""
    add_target(parser)
    parser.add_argument("--steps", metavar="FIRST-LAST", help="only these batches, such as 10-30")
    parser.add_argument(
        "--batch",
        metavar="N",
        help="print what every process did for one batch, and where it waited; FIRST-LAST: the medians of several. The "
        "run needs monitor.trace=true",
    )
    parser.add_argument("--json", action="store_true", help="with --batch: print JSON")
    parser.add_argument("--out", metavar="FILE", help=f"output file (default: {TIMELINE_FILE} in the run's folder)")


def timeline(arguments: argparse.Namespace) -> int:
    """Write the run's timeline and print its path, or with ``--batch`` print a waterfall. Return 0."""
    folder = find_run_folder(arguments)
    if not folder.is_dir():
        raise CommandError(f"{folder}: no run has left a folder there{run_list_suffix()}")
    if arguments.batch is not None:
        waterfall = batch_waterfall(folder, arguments.batch)
        print(as_json(waterfall) if arguments.json else as_text(waterfall))
        return 0
    if arguments.json:
        raise CommandError("--json is for one batch: add --batch N")
    out = Path(arguments.out) if arguments.out else folder / TIMELINE_FILE
    print(write_timeline(folder, out, _steps(arguments.steps)))
    return 0


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise CommandError(f"--steps is {text!r}, wanted FIRST-LAST such as 10-30")
    return int(match[1]), int(match[2])
