"""Formats of the files that a run goes on from: older ones are read, one that only a newer release reads is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.release import VERSION
from trinity_mq.runtime.errors import FatalError

FORMAT, RELEASE = "format", "release"
"""Keys of JSON files: the format, and the release that wrote it. Release 0.1.0 wrote neither, and format 1."""


class NewerStateError(FatalError):
    """A file was written by a newer release, in a format that this one does not read."""


def refuse_newer(path: Path, seen: int, newest: int, release: str = "of a later date") -> None:
    """Return if ``path``, of format ``seen``, is none that only a newer release reads.

    Args:
        path: The file.
        seen: Its format.
        newest: The newest one that this release reads.
        release: The release that wrote it, where that is known.

    Raises:
        NewerStateError: It is.
    """
    if seen > newest:
        raise NewerStateError(
            f"{path} has format {seen}, written by release {release}; this is release {VERSION}, which reads formats 1 "
            f"to {newest}. Upgrade trinity-mq here, or restore the copy of the run's folder that was made before the "
            "upgrade (docs/upgrading.md); nothing was changed"
        )


def format_of(path: Path, fields: Mapping[str, Any], newest: int) -> int:
    """Return the format that a JSON file says it has, 1 where it says none.

    Raises:
        NewerStateError: As :func:`refuse_newer`.
        ValueError: It is no whole number from 1.
    """
    seen = fields.get(FORMAT, 1)
    if type(seen) is not int or seen < 1:
        raise ValueError(f"{path} has format {seen!r}, wanted a whole number from 1 to {newest}")
    refuse_newer(path, seen, newest, *([str(fields[RELEASE])] if RELEASE in fields else []))
    return seen
