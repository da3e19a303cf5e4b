"""Files that commands write where a person says."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.cli.errors import CommandError


def write_output(path: Path, text: str) -> None:
    """Write ``text`` into a file.

    Raises:
        CommandError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
