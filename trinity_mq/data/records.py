"""Reads and checks the records of tasksets and of the trainer's data."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgpack

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.storage import RecordsConfig, open_storage
from trinity_mq.messages.msgpack_scan import GREATEST_INTEGER, LEAST_INTEGER
from trinity_mq.telemetry import mask_passwords

Record = Mapping[str, Any]


def read_records(config: RecordsConfig, max_bytes: int | None = None, seed: int = 0) -> tuple[list[Record], str]:
    """Return the records that ``config`` names, at most ``config.limit`` of them, and their identity: their number and
    a hash of their content.

    Args:
        config: The source of the records. Every record must have its ``required_keys``.
        max_bytes: Maximum bytes of a record in a message. None: unlimited.
        seed: Seed of generated records.

    Raises:
        TasksetError: The source does not exist, cannot be read or is empty, or a record lacks a key, cannot be
            serialised, or exceeds ``max_bytes``.
    """
    digest, keys = hashlib.sha256(), config.required_keys
    rows: list[Record] = []
    for where, row in open_storage(config.storage_type).read(config, seed):
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


def check_records_unchanged(
    what: str, config: RecordsConfig, saved: object, rows: Sequence[Record], identity: str
) -> None:
    """Check that the records are the same as at the start of the run.

    Args:
        what: Name for the message: ``taskset 'train'``.
        config: The source of the records.
        saved: Identity of the records at the start of the run, as :func:`read_records` returns it.
        rows: The current records; empty for recorded experiences.
        identity: Identity of the current records.

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


def _packable(value: Any) -> Any:
    """Return a JSON-like form of a value for which MessagePack has no type: decimals as numbers, or as text beyond 64
    bits; dates, times and UUIDs as text; durations in seconds; values of NumPy as numbers or lists.

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
    """Return the serialised record, after checking that it has a value at each of ``keys``.

    Raises:
        TasksetError: The row is not a record, lacks a key, or cannot be serialised.
    """
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
