"""Reads and checks the records of tasksets and of the trainer's data."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import msgpack

from trinity_mq.config import TasksetConfig
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.files import read_file
from trinity_mq.data.reasoning_gym_records import reasoning_gym_rows
from trinity_mq.data.synthetic import problems
from trinity_mq.messages.msgpack_scan import GREATEST_INTEGER, LEAST_INTEGER
from trinity_mq.telemetry import mask_passwords

Record = Mapping[str, Any]


class RecordsConfig(Protocol):
    """The settings of a source of records: a taskset, or data of the trainer."""

    @property
    def name(self) -> str:
        """Name in errors."""

    @property
    def storage_type(self) -> str:
        """Return ``file``, ``huggingface``, ``sql`` or ``synthetic``."""

    @property
    def path(self) -> str:
        """File, dataset or generator."""

    @property
    def query(self) -> str:
        """Table or SELECT statement of a database."""

    @property
    def subset_name(self) -> str | None:
        """Configuration of a dataset."""

    @property
    def split(self) -> str:
        """Part of a dataset or generator."""

    @property
    def limit(self) -> int | None:
        """Maximum number of records. None: all."""


def read_tasks(config: TasksetConfig, max_bytes: int | None = None, seed: int = 0) -> tuple[list[Record], str]:
    """Return the records of a taskset, as :func:`read_records` does; ``seed`` is used for generated records."""
    if config.storage_type == "queue":
        raise TasksetError(f"taskset {config.name!r} is fed by submitted tasks: it holds no records to read")
    keys = {"prompt_key": config.format.prompt_key, "response_key": config.format.response_key}
    if config.storage_type == "reasoning_gym":  # some of its datasets have no single right answer
        return _checked_records(config, {"prompt_key": keys["prompt_key"]}, max_bytes, reasoning_gym_rows(config, seed))
    return read_records(config, keys, max_bytes)


def read_records(
    config: RecordsConfig, keys: Mapping[str, str], max_bytes: int | None = None
) -> tuple[list[Record], str]:
    """Return the records that ``config`` names, at most ``config.limit`` of them, and a hash of them.

    Args:
        config: The source of the records.
        keys: Required keys of every record, by the name of the setting that defines the key. An empty key is not
            required.
        max_bytes: Maximum bytes of a record in a message. None: unlimited.

    Raises:
        TasksetError: The source does not exist or cannot be read, or a record lacks a key, cannot be serialised, or
            exceeds ``max_bytes``.
    """
    sources = {"file": _file, "huggingface": _hugging_face, "sql": _sql, "synthetic": _synthetic}
    return _checked_records(config, keys, max_bytes, sources[config.storage_type](config))


def check_records_unchanged(
    what: str, config: RecordsConfig, saved: object, rows: Sequence[Record], identity: str
) -> None:
    """Check that the records are the same as at the start of the run.

    Args:
        what: Name for the message: ``taskset 'train'``.
        config: The source of the records.
        saved: Hash of the records at the start of the run.
        rows: The current records; empty for recorded experiences.
        identity: Hash of the current records.

    Raises:
        TasksetError: The records differ. The message describes the change.
    """
    if saved != identity:
        limit = "" if config.limit is None else f" (limit: {config.limit})"
        change = _describe_change(config, str(saved), rows, identity)
        raise TasksetError(
            f"{what}: the records of {mask_passwords(config.path)}{limit} have changed since the run began: {change}. "
            "Put the old data back, or start over with `trinity-mq run CONFIG --fresh`"
        )


def _describe_change(config: RecordsConfig, saved: str, rows: Sequence[Record], identity: str) -> str:
    before, now = (int(count) if (count := of.partition("-")[0]).isdecimal() else 0 for of in (saved, identity))
    if before == now:
        return f"there are {now} as before, but some have other content or another position"
    if before > now:
        return f"there were {before}, and {before - now} fewer are there now"
    first = hashlib.sha256(b"".join(_packed(config, {}, "", row) for row in rows[:before]))
    if saved == f"{before}-{first.hexdigest()[:16]}":
        return f"{now - before} were appended to the {before} earlier records, which are unchanged"
    return f"there were {before} and are {now}"


def _checked_records(
    config: RecordsConfig, keys: Mapping[str, str], max_bytes: int | None, source: Iterable[tuple[str, Any]]
) -> tuple[list[Record], str]:
    """Return the records of ``source``, which yields pairs of place and record, and a hash of them."""
    digest = hashlib.sha256()
    rows: list[Record] = []
    for where, row in source:
        if config.limit is not None and len(rows) == config.limit:
            break
        packed = _packed(config, keys, where, row)
        if max_bytes is not None and len(packed) > max_bytes:
            raise TasksetError(
                f"taskset {config.name!r}: {where}: the record takes {len(packed)} bytes in a message, and "
                f"broker.max_message_bytes leaves {max_bytes} for one. Give large fields such as images as paths or "
                "URLs, leave the record out, or raise the limit (RabbitMQ 4 takes 16 MiB)"
            )
        digest.update(packed)
        rows.append(msgpack.unpackb(packed, strict_map_key=False))
    if not rows:
        raise TasksetError(f"taskset {config.name!r}: {config.path} holds no records")
    return rows, f"{len(rows)}-{digest.hexdigest()[:16]}"


def _synthetic(config: RecordsConfig) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(problems(config.path, config.split)):
        yield f"{config.path}[{number}]", row


def _file(config: RecordsConfig) -> Iterator[tuple[str, Any]]:
    try:
        yield from read_file(Path(config.path).expanduser())
    except TasksetError as error:
        raise TasksetError(f"taskset {config.name!r}: {error}") from error


def _hugging_face(config: RecordsConfig) -> Iterator[tuple[str, Any]]:
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
            rows: Iterable[Any] = loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(config.path, config.subset_name, split=config.split)
    except Exception as error:  # the package, the hub and the network may raise any error
        detail = " ".join(str(error).split()) or type(error).__name__
        raise TasksetError(
            f"taskset {config.name!r}: dataset {config.path!r} split {config.split!r} cannot be loaded: {detail}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{config.path}[{number}]", row


def _sql(config: RecordsConfig) -> Iterator[tuple[str, Any]]:
    try:
        import sqlalchemy
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise TasksetError(
            f"taskset {config.name!r}: storage_type sql needs the package SQLAlchemy: pip install 'trinity-mq[sql]', "
            "and a driver for databases other than SQLite, such as psycopg"
        ) from error
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


def _packable(value: Any) -> Any:
    """Return a JSON-like form of a value for which MessagePack has no type: decimals as numbers, or as text beyond 64
    bits; dates and times as text; durations in seconds.

    Raises:
        TypeError: The value has no such form.
    """
    match value:
        case Decimal() if value.is_finite() and value == value.to_integral_value():
            whole = value.to_integral_value()  # int() is avoided for larger values: 1E+999999999 has a billion digits
            return int(whole) if LEAST_INTEGER <= whole <= GREATEST_INTEGER else str(whole)
        case Decimal():
            return float(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case UUID():
            return str(value)
        case _ if hasattr(value, "tolist"):  # a value of NumPy
            return value.tolist()
    raise TypeError(f"{value!r:.60}, of type {type(value).__name__}")


def _packed(config: RecordsConfig, keys: Mapping[str, str], where: str, row: Any) -> bytes:
    """Return the serialised record, after checking that a task can be made from it."""
    if not isinstance(row, Mapping):
        raise TasksetError(f"taskset {config.name!r}: {where}: holds a {type(row).__name__}, wanted a record with keys")
    for setting, key in keys.items():
        if key and row.get(key) is None:
            raise TasksetError(
                f"taskset {config.name!r}: {where}: has nothing at {key!r} (its keys: {', '.join(map(str, row))}); "
                f"set format.{setting} to the right key"
                + (", or to '' if there is none" if setting != "prompt_key" else "")
            )
    try:
        packed: bytes = msgpack.packb(dict(row), use_bin_type=True, default=_packable)
    except (TypeError, ValueError, OverflowError) as error:
        raise TasksetError(
            f"taskset {config.name!r}: {where}: holds a value that a message cannot carry: {error}"
        ) from error
    return packed
