"""Storages of tasks, training data and experiences, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trinity_mq.config import ExperienceBufferConfig, ExplorerOutputConfig, TasksetConfig
from trinity_mq.config.buffer.storages import STORAGE_GROUP, STORAGES
from trinity_mq.data.errors import TasksetError
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.plugins import create

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

RecordsConfig = TasksetConfig | ExperienceBufferConfig
"""Settings of a source of records."""


NO_SQLALCHEMY = (
    "storage_type sql needs the package SQLAlchemy: pip install 'trinity-mq[sql]', and a driver for databases other "
    "than SQLite, such as psycopg"
)
"""Error message if the package SQLAlchemy is not installed."""


class SinkError(FatalError):
    """An output of experiences cannot be used. The message gives the remedy."""


class ExperienceSink(Protocol):
    """Stores the experiences of batches. Its methods block: call them on a thread."""

    title: str
    """The destination of the experiences, for a person."""

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        """Write the experiences of a batch durably and atomically. Experiences written earlier for this batch are
        replaced.

        Raises:
            SinkError: The experiences cannot be written.
        """

    def close(self) -> None:
        """Release all resources."""


class Storage:
    """A source of records, an output of experiences, or both. A subclass overrides the methods that it supports."""

    def read(self, config: RecordsConfig, seed: int) -> Iterable[tuple[str, Any]]:
        """Return the records, each with its place for messages. The caller checks the records and applies
        ``config.limit``.

        Args:
            config: The taskset, or the data of the trainer.
            seed: Seed of the run, for generated records.

        Raises:
            TasksetError: The records cannot be read.
        """
        if not config.storage.holds_records:
            raise TasksetError(f"taskset {config.name!r} is fed by submitted tasks: it holds no records to read")
        raise TasksetError(f"taskset {config.name!r}: storage_type {config.storage_type} holds no records")

    def open_output(self, config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
        """Return the output that ``config`` describes, ready for writing.

        Raises:
            SinkError: The output cannot be used, or its package is not installed.
        """
        raise SinkError(f"storage_type {config.storage_type} stores no experiences")


def open_storage(name: str) -> Storage:
    """Return the storage with this name: a key of :data:`STORAGES`, a dotted path or an entry point.

    Raises:
        UnknownNameError: The name does not exist, or does not refer to a subclass of :class:`Storage`.
    """
    storage: Storage = create(
        "storage", name, {name: row.target for name, row in STORAGES.items()}, STORAGE_GROUP, Storage
    )
    return storage


def open_output(config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
    """Return the output that ``config`` describes. Raises the errors of its storage and of :func:`open_storage`."""
    return open_storage(config.storage_type).open_output(config, run_folder)
