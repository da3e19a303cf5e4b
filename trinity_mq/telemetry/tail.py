"""Reads a growing file: each line once, after it was written completely."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 1 << 20
"""Maximum bytes of a line. A longer line is yielded in pieces."""


class Tail:
    """Reads the lines that were appended to a file since the last read. The file may not exist yet.

    Args:
        path: The file.
        offset: Number of bytes that were read before, possibly by another process.
        inode: Inode of the only file to read; another file at the path is not read. None: any file is read.
    """

    def __init__(self, path: Path, offset: int = 0, *, inode: int | None = None) -> None:
        self.path, self.offset, self._inode = path, offset, inode
        self._last_inode: int | None = None
        """Inode of the file that the last call of :meth:`read` opened."""
        self.caught_up = False
        """Whether the last read reached the end of the file."""

    def read(self, max_bytes: int = sys.maxsize) -> Iterator[bytes]:
        """Yield the complete lines with their line ends. A file that became shorter, or that replaced the file of the
        last read, is read from its beginning.

        The offset moves past a line when the next line is requested, so a line whose handling fails is read again.

        Args:
            max_bytes: Number of bytes after which no further line is read.

        Raises:
            OSError: The file exists, but it cannot be read.
        """
        self.caught_up = True
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if self._inode not in {None, status.st_ino}:  # the file was renamed
                return
            if status.st_size < self.offset or self._last_inode not in {None, status.st_ino}:
                self.offset = 0
            self._last_inode = status.st_ino
            end = min(status.st_size, self.offset + max_bytes)
            self.caught_up = end == status.st_size
            file.seek(self.offset)
            while self.offset < end and (line := file.readline(LONGEST_LINE)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    return  # the line is still being written
                yield line
                self.offset += len(line)
