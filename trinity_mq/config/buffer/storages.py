"""Table of storages: sources of tasks, sources of training data, and outputs of experiences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator

from trinity_mq.config.base import NameIn

Use = Literal["tasks", "training", "output"]


@dataclass(frozen=True, slots=True)
class StorageRow:
    """Facts about a storage that are needed where the storage is not imported."""

    target: str
    """``module:attribute`` of its class, a :class:`trinity_mq.data.storage.Storage`."""
    uses: tuple[Use, ...]
    """Uses of the storage. ``tasks``: in tasksets. ``training``: as data of the trainer. ``output``: for processed
    experiences."""
    holds_records: bool = True
    """Whether it holds records at ``path``. Otherwise messages bring the content."""
    holds_experiences: bool = False
    """Whether it can return experiences as training data, instead of or in addition to records."""
    is_database: bool = False
    """Whether ``path`` is the URL of a database. As a source it needs a ``query``."""
    takes_args: bool = False
    """Whether a taskset may have ``dataset_args``."""
    splits: tuple[str, ...] = ()
    """Names of its splits. Empty: any."""
    reward_fn: str = ""
    """Default reward function of tasksets with this storage. Their records need no answer. Empty: no default."""


STORAGES: Mapping[str, StorageRow] = MappingProxyType(
    {
        "stream": StorageRow(
            "trinity_mq.data.storage:Storage", ("training",), holds_records=False, holds_experiences=True
        ),
        "file": StorageRow("trinity_mq.data.sources:FileStorage", ("tasks", "training"), holds_experiences=True),
        "huggingface": StorageRow("trinity_mq.data.sources:HuggingFaceStorage", ("tasks", "training")),
        "sql": StorageRow("trinity_mq.data.sources:SqlStorage", ("tasks", "training", "output"), is_database=True),
        "synthetic": StorageRow("trinity_mq.data.sources:SyntheticStorage", ("tasks", "training")),
        "reasoning_gym": StorageRow(
            "trinity_mq.data.reasoning_gym_records:ReasoningGymStorage",
            ("tasks",),
            takes_args=True,
            splits=("train", "test"),
            reward_fn="reasoning_gym_reward",
        ),
        "queue": StorageRow("trinity_mq.data.storage:Storage", ("tasks",), holds_records=False),
        "body": StorageRow("trinity_mq.data.sinks.files:BodyStorage", ("output",)),
        "jsonl": StorageRow("trinity_mq.data.sinks.files:JsonLinesStorage", ("output",)),
        "parquet": StorageRow("trinity_mq.data.sinks.files:ParquetStorage", ("output",)),
    }
)
"""The built-in storages by ``storage_type``."""
STORAGE_GROUP = "trinity_mq.storages"
"""Entry-point group under which installed packages add storages."""
PLUGIN_STORAGE = StorageRow("", ("tasks", "training", "output"), takes_args=True)
"""Facts about every plug-in."""


def _names(use: Use) -> AfterValidator:
    return AfterValidator(NameIn("storage", [name for name, row in STORAGES.items() if use in row.uses], STORAGE_GROUP))


TaskStorage = Annotated[str, _names("tasks")]
TrainingStorage = Annotated[str, _names("training")]
OutputStorage = Annotated[str, _names("output")]


def storage_row(name: str) -> StorageRow:
    """Return the facts about a storage of the table or a plug-in."""
    return STORAGES.get(name, PLUGIN_STORAGE)


def check_source(kind: str, name: str, storage_type: str, path: str, query: str) -> None:
    """Check that a source has the settings that its storage needs: a path, and for a database also a query.

    Raises:
        ValueError: A path or a query is missing, or a query is not allowed.
    """
    row = storage_row(storage_type)
    if row.holds_records and not path:
        raise ValueError(f"{kind}{name!r} of storage_type {storage_type!r} needs a path")
    if row.is_database and not query:
        raise ValueError(
            f"{name!r} of storage_type {storage_type} needs a query: a table's name, or a SELECT statement with an "
            "ORDER BY"
        )
    if query and not row.is_database:
        raise ValueError(
            f"{name!r} has a query and storage_type {storage_type}, which reads no database: set storage_type to sql"
        )
