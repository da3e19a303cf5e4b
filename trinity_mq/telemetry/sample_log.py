"""Experiences kept in a run's folder to be looked at later: bounded files of encoded bodies, appended step by step.

Each record is a header of 24 bytes (magic, train step, length of the body) and the encoded experiences.
Segments are removed oldest first, so that the folder never grows beyond its limit by more than one record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

log = structlog.get_logger(__name__)

SAMPLES_FOLDER = "samples"
SEGMENTS = 8
"""Files in which a full log is kept, and the part of it that is removed at a time."""
KIND, FORMAT = b"TMQSMPL", b"1"
MAGIC = KIND + FORMAT
_HEADER = struct.Struct("<8sQQ")
_MOST_BODY = 1 << 32
"""Bytes of a body; a longer one is taken for a damaged header."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Experiences of one train step."""

    step: int
    """Train steps made by then."""
    body: bytes
    """Encoded experiences."""


class SampleLog:
    """Writes records. One process writes at a time.

    Args:
        folder: Folder of the segments, made with the first record.
        max_bytes: Bytes of all segments.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file: BinaryIO | None = None

    def append(self, step: int, body: bytes) -> None:
        """Append a record, in one write.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open(self._next_number())
        elif self._file.tell() >= self._max_bytes // SEGMENTS:
            self._open(self._next_number())
        assert self._file is not None
        self._file.write(_HEADER.pack(MAGIC, step, len(body)) + body)
        self._file.flush()
        self._trim()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_number(self) -> int:
        return max((int(path.stem) for path in segments(self._folder)), default=0) + 1

    def _open(self, number: int) -> None:
        self.close()
        self._file = (self._folder / f"{number:08d}.samples").open("ab", buffering=0)

    def _trim(self) -> None:
        found = segments(self._folder)
        sizes = [path.stat().st_size for path in found]
        while len(found) > 1 and sum(sizes) > self._max_bytes:
            found.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def segments(folder: Path) -> list[Path]:
    """Return the segments, oldest first."""
    return sorted(path for path in folder.glob("*.samples") if path.stem.isdecimal())


class SampleLogReader:
    """Reads records as they are appended; a record that is not whole yet comes with a later call.

    Args:
        folder: Folder of the segments; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def read(self) -> Iterator[SampleRecord]:
        """Yield the records since the last call, oldest first; a damaged segment is read up to the damage."""
        found = segments(self._folder)
        names = {path.name for path in found}
        self._offsets = {name: offset for name, offset in self._offsets.items() if name in names}
        for path in found:
            try:
                with path.open("rb") as file:
                    yield from self._records(path.name, file)
            except FileNotFoundError:  # removed as the oldest meanwhile
                continue

    def _records(self, name: str, file: BinaryIO) -> Iterator[SampleRecord]:
        size = os.fstat(file.fileno()).st_size
        offset = self._offsets.get(name, 0)
        if size < offset:  # that of a run begun anew
            offset = 0
        while size - offset >= _HEADER.size:
            file.seek(offset)
            magic, step, length = _HEADER.unpack(file.read(_HEADER.size))
            if magic[:-1] == KIND and magic[-1:] > FORMAT:
                log.warning(
                    "samples_of_a_newer_release",
                    file=name,
                    format=magic[-1:].decode(errors="replace"),
                    newest_read=FORMAT.decode(),
                    advice="look at the run with the release that wrote it",
                )
            if magic != MAGIC or length > _MOST_BODY:
                self._offsets[name] = size  # torn by a writer that was killed: nothing behind it can be found
                return
            if size - offset - _HEADER.size < length:
                return
            body = file.read(length)
            offset += _HEADER.size + length
            self._offsets[name] = offset
            yield SampleRecord(step, body)
