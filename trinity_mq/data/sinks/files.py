"""A folder with a file for each batch."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from trinity_mq.config import ExplorerOutputConfig
from trinity_mq.data.storage import ExperienceSink, SinkError, Storage
from trinity_mq.experience import EncodeError, Experience, ExperienceBatch
from trinity_mq.experience.hf import ENCODED, to_record, with_json_texts
from trinity_mq.runtime.process import write_atomic

Encode = Callable[[Sequence[Experience]], bytes]


class FileSink:
    """Writes a file ``batch-<number><suffix>`` for each batch, by an atomic rename.

    Args:
        folder: Target folder, created if missing.
        suffix: Suffix of the file names.
        encode: Encodes the content of a file.
    """

    def __init__(self, folder: Path, suffix: str, encode: Encode) -> None:
        self._folder, self._suffix, self._encode = folder.absolute(), suffix, encode
        self.title = str(self._folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkError(f"the folder {self._folder} cannot be made: {error.strerror or error}") from error

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        """Write a batch's file, replacing an earlier file.

        Raises:
            SinkError: The file cannot be written.
        """
        path = self._folder / f"batch-{batch:06d}{self._suffix}"
        try:
            write_atomic(path, self._encode(experiences))
        except (OSError, EncodeError) as error:
            raise SinkError(f"{path} cannot be written: {error}; check space and permissions") from error

    def close(self) -> None:
        """Do nothing: every file is already closed."""


class _FolderStorage(Storage, ABC):
    suffix: ClassVar[str]

    @abstractmethod
    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return the content of a batch's file."""

    def open_output(self, config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
        """Return an output that writes to the folder of ``config``, or to ``experiences`` in the run's folder."""
        folder = Path(config.path).expanduser() if config.path else run_folder / "experiences"
        return FileSink(folder, self.suffix, self.encode)


class BodyStorage(_FolderStorage):
    """Output of files with an experience body, which stores the experiences exactly."""

    suffix = ".tmqx"

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return an experience body."""
        return ExperienceBatch.of(experiences).encode()


class JsonLinesStorage(_FolderStorage):
    """Output of files with a JSON line for each experience, with the plain columns of a dataset's row."""

    suffix = ".jsonl"

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return a JSON line for each experience."""
        rows = (
            {name: value for name, value in to_record(experience).items() if name != ENCODED}
            for experience in experiences
        )
        return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


class ParquetStorage(_FolderStorage):
    """Output of Parquet files with rows as in :func:`trinity_mq.experience.to_hf_datasets`; ``from_hf_datasets`` reads
    such rows.
    """

    suffix = ".parquet"

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return a Parquet file.

        Raises:
            SinkError: pyarrow is not installed.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise SinkError(
                "storage_type parquet needs the package pyarrow: pip install 'trinity-mq[parquet]', or set it to body"
            ) from error
        rows = [with_json_texts(to_record(experience)) for experience in experiences]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        file = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), file)
        return file.getvalue()
