"""Experiences stored in the folder of a run for later inspection: bounded files of encoded bodies, appended after each
train step. :mod:`trinity_mq.telemetry.evaluations.log` stores evaluations in files of the same format.

Each record is a header of 24 bytes (magic, train step, body length) and the encoded experiences. The oldest segments
are removed first, so that the folder never exceeds its limit by more than one record.
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
"""Number of files of a full log. A single file is removed at a time."""
KIND, FORMAT = b"TMQSMPL", b"1"
MAGIC = KIND + FORMAT
_HEADER = struct.Struct("<8sQQ")
_MOST_BODY = 1 << 32
"""Maximum bytes of a body. A greater length counts as a damaged header."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Experiences of a train step."""

    step: int
    """Number of train steps made so far. In files of evaluations: the label of the evaluation."""
    body: bytes
    """Encoded experiences of the step."""


class SampleLog:
    """Writes records. Only one process may write at a time.

    Args:
        folder: Folder of the segments, created with the first record.
        max_bytes: Maximum bytes of all segments.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file: BinaryIO | None = None

    def append(self, step: int, body: bytes) -> None:
        """Append a record. After an error the next record starts a new segment, because no record after a torn record
        can be read.

        Raises:
            OSError: The disk is full, or the folder is not writable.
        """
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open(self._next_number())
        elif self._file.tell() >= self._max_bytes // SEGMENTS:
            self._open(self._next_number())
        assert self._file is not None
        record = memoryview(_HEADER.pack(MAGIC, step, len(body)) + body)
        try:
            while record:  # a write may be short: on a nearly full disk, or over 2 GiB
                record = record[self._file.write(record) :]
        except OSError:
            self.close()
            raise
        self._trim()

    def close(self) -> None:
        """Close the current segment."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_number(self) -> int:
        return max((int(path.stem) for path in segments(self._folder)), default=0) + 1

    def _open(self, number: int) -> None:
        self.close()
        self._file = (self._folder / f"{number:08d}.samples").open("ab", buffering=0)

    def _trim(self) -> None:
        paths = segments(self._folder)
        sizes = [path.stat().st_size for path in paths]
        while len(paths) > 1 and sum(sizes) > self._max_bytes:
            paths.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def segments(folder: Path) -> list[Path]:
    """Return the segments, oldest first."""
    return sorted(path for path in folder.glob("*.samples") if path.stem.isdecimal())


class SampleLogReader:
    """Reads records as they are appended. A record that is still incomplete is left to a later call.

    Args:
        folder: Folder of the segments. It may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def read(self) -> Iterator[SampleRecord]:
        """Yield the records since the last call, oldest first. A damaged segment is read up to the damage."""
        paths = segments(self._folder)
        names = {path.name for path in paths}
        self._offsets = {name: offset for name, offset in self._offsets.items() if name in names}
        for path in paths:
            try:
                with path.open("rb") as file:
                    yield from self._records(path.name, file)
            except FileNotFoundError:  # removed in the meantime as the oldest segment
                continue

    def _records(self, name: str, file: BinaryIO) -> Iterator[SampleRecord]:
        size = os.fstat(file.fileno()).st_size
        offset = self._offsets.get(name, 0)
        if size < offset:  # the file belongs to a run that was started again
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
                self._offsets[name] = size  # torn by a killed writer: no record after the damage can be located
                return
            if size - offset - _HEADER.size < length:
                return
            body = file.read(length)
            offset += _HEADER.size + length
            self._offsets[name] = offset
            yield SampleRecord(step, body)
