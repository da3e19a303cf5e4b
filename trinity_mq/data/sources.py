"""Storages with records: files, Hugging Face datasets, databases, and synthetic problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trinity_mq.config import ExplorerOutputConfig
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.files import read_file
from trinity_mq.data.storage import NO_SQLALCHEMY, ExperienceSink, RecordsConfig, Storage
from trinity_mq.data.synthetic import problems
from trinity_mq.telemetry import mask_passwords


class SyntheticStorage(Storage):
    """Storage of synthetic problems, which a generator makes without any file."""

    def read(self, config: RecordsConfig, seed: int) -> Iterator[tuple[str, Any]]:
        """Yield the problems of the split."""
        for number, row in enumerate(problems(config.path, config.split)):
            yield f"{config.path}[{number}]", row


class FileStorage(Storage):
    """Storage in a file, in one of the formats of :mod:`trinity_mq.data.files`."""

    def read(self, config: RecordsConfig, seed: int) -> Iterator[tuple[str, Any]]:
        """Yield the records of the file."""
        try:
            yield from read_file(Path(config.path).expanduser())
        except TasksetError as error:
            raise TasksetError(f"taskset {config.name!r}: {error}") from error


class HuggingFaceStorage(Storage):
    """Storage in a dataset folder, or in a dataset of the hub."""

    def read(self, config: RecordsConfig, seed: int) -> Iterator[tuple[str, Any]]:
        """Yield the rows of the split. If a saved folder holds a single dataset, yield all its rows for its own split
        and for the default split.
        """
        try:
            import datasets
        except ImportError as error:
            raise TasksetError(
                f"taskset {config.name!r}: storage_type huggingface needs the package datasets: "
                "pip install 'trinity-mq[datasets]', or give a JSONL file with storage_type: file"
            ) from error
        folder = Path(config.path).expanduser()
        try:
            if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
                loaded = datasets.load_from_disk(str(folder))
                is_single = isinstance(loaded, datasets.Dataset)
                if is_single and config.split not in ("train", str(loaded.split)):  # train is the default of split
                    label = "no split" if loaded.split is None else f"split {str(loaded.split)!r}"
                    raise ValueError(
                        f"the folder holds a single dataset of {label}. Remove split to read all its rows, or give the "
                        "folder of the other split"
                    )
                rows: Iterable[Any] = loaded if is_single else loaded[config.split]
            else:
                rows = datasets.load_dataset(config.path, config.subset_name, split=config.split)
        except Exception as error:  # the package, the hub and the network may raise any error
            detail = " ".join(str(error).split()) or type(error).__name__
            raise TasksetError(
                f"taskset {config.name!r}: dataset {config.path!r} split {config.split!r} cannot be loaded: {detail}"
            ) from error
        for number, row in enumerate(rows):
            yield f"{config.path}[{number}]", row


class SqlStorage(Storage):
    """Storage in a database: rows of a query are records, and experiences become rows of a table."""

    def read(self, config: RecordsConfig, seed: int) -> Iterator[tuple[str, Any]]:
        """Yield the rows of the query, or of the table that it names in the order of its primary key."""
        try:
            import sqlalchemy
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError as error:
            raise TasksetError(f"taskset {config.name!r}: {NO_SQLALCHEMY}") from error
        engine = None
        try:
            engine = sqlalchemy.create_engine(config.path)
            with engine.connect() as connection:
                if " " in config.query.strip():
                    rows = connection.execute(sqlalchemy.text(config.query))
                else:
                    table = sqlalchemy.Table(config.query.strip(), sqlalchemy.MetaData(), autoload_with=engine)
                    keys = list(table.primary_key.columns) or list(table.columns)
                    rows = connection.execute(sqlalchemy.select(table).order_by(*keys))
                for number, row in enumerate(rows.mappings()):
                    yield f"{config.query}[{number}]", dict(row)
        except (SQLAlchemyError, ImportError) as error:
            reason = mask_passwords(" ".join(str(error).split())[:300])
            raise TasksetError(
                f"taskset {config.name!r}: {config.query!r} of {mask_passwords(config.path)} cannot be read: {reason}"
            ) from error
        finally:
            if engine is not None:
                engine.dispose()

    def open_output(self, config: ExplorerOutputConfig, run_folder: Path) -> ExperienceSink:
        """Return an output that writes to the table of ``config``, created if missing."""
        from trinity_mq.data.sinks.sql import SqlSink

        return SqlSink(config.path, config.table)
