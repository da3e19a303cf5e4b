"""Converts files of experiences of Trinity-RFT into .tmqx files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import write_atomic

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

SUFFIX = ".tmqx"


@dataclass
class Outcome:
    """The result of converting one file."""

    read: int = 0
    written: int = 0
    skipped: list[str] = field(default_factory=list)
    """One reason for each skipped experience."""


class SkippedError(Exception):
    """No experiences could be converted from a file; the message gives the reason."""


def targets(inputs: Sequence[Path], out: Path, *, is_folder: bool = False) -> list[Path]:
    """Return the target path of each input: ``out`` if it ends in ``.tmqx``, else a file of the input's name in
    ``out``.

    Raises:
        CommandError: Two inputs have the same target, or a target is an input.
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
        if target.exists() and any(path.exists() and path.samefile(target) for path in inputs):
            raise CommandError(f"{target} is an input and is never overwritten; give another --out")
    return result


def convert_file(source: Path, target: Path, compression: Literal["none", "zstd"], *, strict: bool) -> Outcome:
    """Convert the experiences of one file to another file.

    Args:
        source: A file with a body of any format, legacy or current.
        target: File to write atomically.
        compression: Compression of the new body.
        strict: Do not write the target if an experience is skipped.

    Raises:
        SkippedError: The file as a whole cannot be read or written.
    """
    from trinity_mq.experience import EncodeError, encode

    outcome, good = _read(source)
    try:
        body = encode(good, compression=compression)
        # a file without experiences becomes an empty body; a file whose experiences were all skipped is not written
        if outcome.skipped and (strict or not good):
            return outcome
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, body)
    except EncodeError as error:
        raise SkippedError(f"its experiences do not go into one body: {error}") from error
    except OSError as error:
        raise SkippedError(f"{target} cannot be written: {error.strerror or error}") from error
    outcome.written = len(good)
    return outcome


def _read(source: Path) -> tuple[Outcome, list[Experience]]:
    """Return the experiences of a file that a body can hold. The outcome contains the reasons for the skipped
    experiences.
    """
    from trinity_mq.experience import DecodeError, EncodeError, decode, encode
    from trinity_mq.experience.legacy.reader import legacy_form, read_legacy_each

    try:
        data = source.read_bytes()
        results = read_legacy_each(data) if legacy_form(data) else decode(data)
    except OSError as error:
        raise SkippedError(f"cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise SkippedError(str(error)) from error
    outcome, good = Outcome(read=len(results)), []
    for number, result in enumerate(results):
        if isinstance(result, DecodeError):
            outcome.skipped.append(str(result))
            continue
        try:
            encode([result])
        except EncodeError as error:
            outcome.skipped.append(f"experience {number}: {str(error).removeprefix('experience 0: ')}")
        else:
            good.append(result)
    return outcome, good
