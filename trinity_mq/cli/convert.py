"""``trinity-mq convert-experiences``: converts experience files of Trinity to experience bodies (``.tmqx``)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.trinity_rft.convert import Outcome, SkippedError, convert_file, targets

if TYPE_CHECKING:
    pass

SHOWN = 10
"""Maximum number of reasons printed per file; further reasons are only counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq convert-experiences``."""
    parser.add_argument("inputs", metavar="IN", nargs="+", help="input files, which are not changed")
    parser.add_argument(
        "--out",
        metavar="FOLDER_OR_FILE",
        required=True,
        help="output: one file if the name ends in .tmqx, else a folder",
    )
    parser.add_argument("--compression", choices=("none", "zstd"), default="none", help="compression of the new files")
    parser.add_argument("--strict", action="store_true", help="stop at the first experience that cannot be converted")


def convert(arguments: argparse.Namespace) -> int:
    """Convert each file and report on it. Return 1 if an experience or file was skipped."""
    inputs = [Path(name) for name in arguments.inputs]
    outputs = targets(inputs, Path(arguments.out), is_folder=arguments.out.endswith(os.sep))
    complete = True
    for source, target in zip(inputs, outputs, strict=True):
        try:
            outcome = convert_file(source, target, arguments.compression, strict=arguments.strict)
        except SkippedError as error:
            complete = False
            print(f"{source}: skipped: {error}")
        else:
            complete = complete and not outcome.skipped
            _report(source, target, outcome)
        if arguments.strict and not complete:
            print("stopped at the first problem, as --strict asks")
            return 1
    return 0 if complete else 1


def _report(source: Path, target: Path, outcome: Outcome) -> None:
    where = str(target) if outcome.written or not outcome.skipped else "nothing written"
    print(f"{source} -> {where}: {outcome.read} read, {outcome.written} written, {len(outcome.skipped)} skipped")
    for reason in outcome.skipped[:SHOWN]:
        print(f"  skipped {reason}")
    if len(outcome.skipped) > SHOWN:
        print(f"  and {len(outcome.skipped) - SHOWN} more")
