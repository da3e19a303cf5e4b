"""``trinity-mq convert-experiences``: files that Trinity wrote become experience bodies (``.tmqx``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trinity_mq.cli.errors import CommandError

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

SUFFIX = ".tmqx"
SHOWN = 10
"""Upper bound of the reasons printed per file; the others are only counted."""


@dataclass
class Outcome:
    """The result of converting one file."""

    read: int = 0
    written: int = 0
    skipped: list[str] = field(default_factory=list)
    """A reason for each experience that was left out."""


class SkippedError(Exception):
    """A file yields nothing; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq convert-experiences``."""
    parser.add_argument("inputs", metavar="IN", nargs="+", help="files, which stay as they are")
    parser.add_argument(
        "--out", metavar="FOLDER_OR_FILE", required=True, help="where to: one file if it ends in .tmqx, else a folder"
    )
    parser.add_argument("--compression", choices=("none", "zstd"), default="none", help="of the new files")
    parser.add_argument("--strict", action="store_true", help="stop at the first experience that cannot be converted")


def convert(arguments: argparse.Namespace) -> int:
    """Convert each file and report on it; 1 when anything was left out."""
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


def targets(inputs: Sequence[Path], out: Path, *, is_folder: bool = False) -> list[Path]:
    """Return where each of ``inputs`` goes: to ``out`` if that ends in ``.tmqx``, else to a file of its name in there.

    Raises:
        CommandError: Two would go to one file, or one to where an input lies.
    """
    if out.suffix == SUFFIX and not is_folder and not out.is_dir():
        if len(inputs) > 1:
            raise CommandError(f"--out {str(out)!r} is one file for {len(inputs)} inputs, wanted a folder")
        result = [out]
    else:
        result = [out / f"{path.stem}{SUFFIX}" for path in inputs]
    taken: dict[Path, Path] = {}
    for source, target in zip(inputs, result, strict=True):
        if target in taken:
            raise CommandError(f"{taken[target]} and {source} would both become {target}; convert them one by one")
        taken[target] = source
        if any(_same(target, path) for path in inputs):
            raise CommandError(f"{target} is an input, which is never written over; give another --out")
    return result


def convert_file(source: Path, target: Path, compression: Literal["none", "zstd"], *, strict: bool) -> Outcome:
    """Write the experiences of one file to another, if there are any that can be.

    Args:
        source: A body of any kind, legacy or not.
        target: Appears complete or not at all.
        compression: Of the new body.
        strict: Write nothing if an experience would be left out.

    Raises:
        SkippedError: The file as a whole cannot be read or written.
    """
    outcome, good = _read(source)
    body, count = _encoded(good, outcome, compression)
    # a file of none becomes a body of none, one that lost all its own becomes nothing
    if outcome.skipped and (strict or not count):
        return outcome
    try:
        _write(target, body)
    except OSError as error:
        raise SkippedError(f"{target} cannot be written: {error.strerror or error}") from error
    outcome.written = count
    return outcome


def _read(source: Path) -> tuple[Outcome, dict[int, Experience]]:
    from trinity_mq.experience import DecodeError, decode
    from trinity_mq.experience.legacy.reader import legacy_form, read_legacy_each

    try:
        data = source.read_bytes()
        results = read_legacy_each(data) if legacy_form(data) else decode(data)
    except OSError as error:
        raise SkippedError(f"cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise SkippedError(str(error)) from error
    good = {number: result for number, result in enumerate(results) if not isinstance(result, DecodeError)}
    return Outcome(read=len(results), skipped=[str(bad) for bad in results if isinstance(bad, DecodeError)]), good


def _encoded(
    good: Mapping[int, Experience], outcome: Outcome, compression: Literal["none", "zstd"]
) -> tuple[bytes, int]:
    """Return a body of those that a body can hold, and how many; ``outcome`` gets the reasons of the others."""
    from trinity_mq.experience import EncodeError, encode

    try:
        return encode(list(good.values()), compression=compression), len(good)
    except EncodeError:
        fitting = []
        for number, experience in good.items():
            try:
                encode([experience])
            except EncodeError as error:
                outcome.skipped.append(f"experience {number}: {str(error).removeprefix('experience 0: ')}")
            else:
                fitting.append(experience)
    try:
        return encode(fitting, compression=compression), len(fitting)
    except EncodeError as error:
        raise SkippedError(f"its experiences do not go into one body: {error}") from error


def _write(target: Path, body: bytes) -> None:
    """Write a file that is complete as soon as it can be seen."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _same(one: Path, other: Path) -> bool:
    """Tell whether two paths lead to one file, links included."""
    return one.exists() and other.exists() and one.samefile(other)


def _report(source: Path, target: Path, outcome: Outcome) -> None:
    where = str(target) if outcome.written or not outcome.skipped else "nothing written"
    print(f"{source} -> {where}: {outcome.read} read, {outcome.written} written, {len(outcome.skipped)} skipped")
    for reason in outcome.skipped[:SHOWN]:
        print(f"  skipped {reason}")
    if len(outcome.skipped) > SHOWN:
        print(f"  and {len(outcome.skipped) - SHOWN} more")
