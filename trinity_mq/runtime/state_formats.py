"""Formats of the files from which a run resumes: older formats are read, newer formats are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.release import VERSION
from trinity_mq.runtime.errors import FatalError

FORMAT, RELEASE = "format", "release"
"""Keys of JSON files: the format, and the release that wrote the file. Release 0.1.0 wrote neither key; its files have
format 1."""


class NewerStateError(FatalError):
    """A file was written by a newer release, in a format that this release does not read."""


def check_readable_format(path: Path, number: int, newest: int, release: str = "of a later date") -> None:
    """Check that this release can read the file ``path`` of format ``number``.

    Args:
        path: The file.
        number: Its format.
        newest: The newest format that this release reads.
        release: The release that wrote the file, if known.

    Raises:
        NewerStateError: The format is newer.
    """
    if number > newest:
        raise NewerStateError(
            f"{path} has format {number}, written by release {release}; this is release {VERSION}, which reads formats "
            f"1 to {newest}. Upgrade trinity-mq here, or restore the copy of the run's folder that was made before the "
            "upgrade (docs/upgrading.md); nothing was changed"
        )


def format_of(path: Path, fields: Mapping[str, Any], newest: int) -> int:
    """Return the format of a JSON file, 1 if the file does not name its format.

    Raises:
        NewerStateError: As :func:`check_readable_format`.
        ValueError: The format is not a positive whole number.
    """
    number = fields.get(FORMAT, 1)
    if type(number) is not int or number < 1:
        raise ValueError(f"{path} has format {number!r}, wanted a whole number from 1 to {newest}")
    check_readable_format(path, number, newest, *([str(fields[RELEASE])] if RELEASE in fields else []))
    return number
