"""``trinity-mq convert-experiences``: converts experiences of Trinity-RFT to experience bodies (``.tmqx``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.trinity_rft.convert import (
    SUFFIX,
    Outcome,
    SkippedError,
    convert_database,
    convert_file,
    is_database,
    targets,
)

SHOWN = 10
"""Maximum number of reasons printed per file; further reasons are only counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq convert-experiences``."""
    parser.add_argument("inputs", metavar="IN", nargs="+", help="input files and SQLite buffers, which are not changed")
    parser.add_argument(
        "--out",
        metavar="FOLDER_OR_FILE",
        required=True,
        help="output: one file if the name ends in .tmqx, else a folder",
    )
    parser.add_argument("--compression", choices=("none", "zstd"), default="none", help="compression of the new files")
    parser.add_argument("--strict", action="store_true", help="stop at the first experience that cannot be converted")


def convert(arguments: argparse.Namespace) -> int:
    """Convert each file and database and report on it. Return 1 if an experience or file was skipped, else 0. With
    ``--strict``, stop at the first experience or file that would be skipped.
    """
    inputs = [Path(name.removeprefix("sqlite:///")) for name in arguments.inputs]
    databases = [path for path in inputs if is_database(path)]
    files = [path for path in inputs if path not in databases]
    out, is_folder = Path(arguments.out), arguments.out.endswith(os.sep)
    if databases and out.suffix == SUFFIX and not is_folder and not out.is_dir():
        raise CommandError(f"--out {arguments.out!r} is one file, and a database becomes several; give a folder")
    jobs: list[tuple[Path, Iterator[tuple[Path, Outcome]]]] = [
        (source, _one(source, target, arguments))
        for source, target in zip(files, targets(files, out, is_folder=is_folder), strict=True)
    ]
    jobs += [
        (source, convert_database(source, out, arguments.compression, strict=arguments.strict)) for source in databases
    ]
    complete = True
    for source, results in jobs:
        try:
            for target, outcome in results:
                complete = complete and not outcome.skipped
                _report(source, target, outcome)
        except SkippedError as error:
            complete = False
            print(f"{source}: skipped: {error}")
        if arguments.strict and not complete:
            print("stopped at the first problem, as --strict asks")
            return 1
    return 0 if complete else 1


def _one(source: Path, target: Path, arguments: argparse.Namespace) -> Iterator[tuple[Path, Outcome]]:
    """Convert one file when the result is requested, and yield its target with the outcome."""
    yield target, convert_file(source, target, arguments.compression, strict=arguments.strict)


def _report(source: Path, target: Path, outcome: Outcome) -> None:
    where = str(target) if outcome.written or not outcome.skipped else "nothing written"
    print(f"{source} -> {where}: {outcome.read} read, {outcome.written} written, {len(outcome.skipped)} skipped")
    for reason in outcome.skipped[:SHOWN]:
        print(f"  skipped {reason}")
    if len(outcome.skipped) > SHOWN:
        print(f"  and {len(outcome.skipped) - SHOWN} more")
