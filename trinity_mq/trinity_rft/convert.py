"""Converts files of experiences of Trinity-RFT into .tmqx files, and its SQLite buffers into .tmqx and .jsonl files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import write_atomic

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

Compression = Literal["none", "zstd"]
SUFFIX = ".tmqx"
DATABASE_MAGIC = b"SQLite format 3\0"
PER_FILE = 1000
"""Maximum number of experiences of a database per file."""
BLOBS = ("experience_bytes", "serialized_exp")
"""Columns with encoded experiences, newest releases first."""
RECORDS = {
    "raw_task": None,
    "message_list": "messages",
    "chosen_message_list": "chosen",
    "rejected_message_list": "rejected",
}
"""Columns with JSON, and the record's key for the value of each. None: the value is the whole record."""


@dataclass
class Outcome:
    """The result of converting one file."""

    read: int = 0
    written: int = 0
    skipped: list[str] = field(default_factory=list)
    """One reason for each skipped experience."""


class SkippedError(Exception):
    """No experiences could be converted from a file; the message gives the reason."""


def targets(inputs: Sequence[Path], out: Path, *, is_folder: bool = False) -> list[Path]:
    """Return the target path of each input: ``out`` if it ends in ``.tmqx`` and is not a folder, else a file of the
    input's name in ``out``. ``is_folder`` says that a missing ``out`` is meant as a folder.

    Raises:
        CommandError: Two inputs have the same target, a target is an input, or ``out`` is a file for several inputs.
    """
    if out.suffix == SUFFIX and not is_folder and not out.is_dir():
        if len(inputs) > 1:
            raise CommandError(f"--out {str(out)!r} is one file for {len(inputs)} inputs, wanted a folder")
        result = [out]
    else:
        result = [out / f"{path.stem}{SUFFIX}" for path in inputs]
    taken: dict[Path, Path] = {}
    for source, target in zip(inputs, result, strict=True):
        if target in taken:
            raise CommandError(f"{taken[target]} and {source} would both become {target}; convert them one by one")
        taken[target] = source
        if target.exists() and any(path.exists() and path.samefile(target) for path in inputs):
            raise CommandError(f"{target} is an input and is never overwritten; give another --out")
    return result


def convert_file(source: Path, target: Path, compression: Compression, *, strict: bool) -> Outcome:
    """Convert the experiences of one file to another file.

    Args:
        source: A file with a body of any format, legacy or current.
        target: File to write atomically.
        compression: Compression of the new body.
        strict: Do not write the target if an experience is skipped.

    Raises:
        SkippedError: The file as a whole cannot be read or written.
    """
    from trinity_mq.experience import EncodeError, encode

    outcome, good = _read(source)
    try:
        return _write(target, outcome, good, lambda: encode(good, compression=compression), strict=strict)
    except EncodeError as error:
        raise SkippedError(f"its experiences do not go into one body: {error}") from error
    except OSError as error:
        raise SkippedError(f"{target} cannot be written: {error.strerror or error}") from error


def _write(
    path: Path, outcome: Outcome, parts: Sequence[Any], content: Callable[[], bytes], *, strict: bool
) -> Outcome:
    """Write a file of converted parts. If all parts were skipped, the file is not written. If none were read, it is
    empty.

    Args:
        path: The file.
        outcome: Outcome of the conversion, whose number of written parts is set.
        parts: The parts that were converted.
        content: Returns the bytes of these parts.
        strict: Write no file if a part was skipped.
    """
    if not (outcome.skipped and (strict or not parts)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content())
        outcome.written = len(parts)
    return outcome


def _read(source: Path) -> tuple[Outcome, list[Experience]]:
    """Return the experiences of a file that a body can hold. The outcome contains the reasons for the skipped
    experiences.
    """
    from trinity_mq.experience import DecodeError, decode
    from trinity_mq.experience.legacy.reader import legacy_form, read_legacy_each

    try:
        data = source.read_bytes()
        results = read_legacy_each(data) if legacy_form(data) else decode(data)
    except OSError as error:
        raise SkippedError(f"cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise SkippedError(str(error)) from error
    return _good_ones(results)


def _good_ones(results: Sequence[Experience | Exception]) -> tuple[Outcome, list[Experience]]:
    """Return the experiences that a body can hold, and an outcome with the reasons why the others were skipped."""
    from trinity_mq.experience import DecodeError, EncodeError, encode

    outcome, good = Outcome(read=len(results)), list[Any]()
    for number, result in enumerate(results):
        if isinstance(result, DecodeError):
            outcome.skipped.append(str(result))
            continue
        try:
            encode([result])  # type: ignore[list-item]
        except EncodeError as error:
            outcome.skipped.append(f"experience {number}: {str(error).removeprefix('experience 0: ')}")
        else:
            good.append(result)
    return outcome, good


def is_database(source: Path) -> bool:
    """Return whether a file is a SQLite database."""
    try:
        with source.open("rb") as file:
            return file.read(len(DATABASE_MAGIC)) == DATABASE_MAGIC
    except OSError:
        return False


def convert_database(
    source: Path, folder: Path, compression: Compression, *, strict: bool, per_file: int = PER_FILE
) -> Iterator[tuple[Path, Outcome]]:
    """Convert the buffers in a database; yield the path of each target file and its outcome. The outcome says whether
    the file was written.

    A table of experiences becomes files of at most ``per_file`` experiences, a table of tasks or messages becomes a
    file of records. The values in the columns of a table take precedence over the encoded values, as in Trinity-RFT.
    The database is opened read-only.

    Args:
        source: The database.
        folder: Folder of the new files, which have the names of the database and its tables.
        compression: Compression of the new bodies.
        strict: Write no file with a skipped row.
        per_file: Maximum number of experiences per file.

    Raises:
        SkippedError: The database cannot be read, or holds no buffer.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(source.resolve()))}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")  # the database must not choose functions that run
            names = [str(name) for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            buffers = [buffer for name in names if (buffer := _Buffer.of(database, name, names)) is not None]
            if not buffers:
                raise SkippedError(f"a database without a buffer of Trinity-RFT (tables: {', '.join(names) or 'none'})")
            names_by_file = {buffer.file_name: buffer.name for buffer in buffers}
            for buffer in buffers:
                if (other := names_by_file[buffer.file_name]) != buffer.name:
                    raise SkippedError(
                        f"tables {buffer.name!r} and {other!r} would both become {buffer.file_name}; rename one of them"
                    )
            for buffer in buffers:
                yield from buffer.convert(database, folder / source.stem, compression, strict=strict, per_file=per_file)
    except sqlite3.Error as error:
        raise SkippedError(f"the database cannot be read: {error}") from error
    except OSError as error:
        raise SkippedError(f"{folder} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Buffer:
    """A table with the rows of a buffer."""

    name: str
    columns: list[str]
    blobs: str
    """Column with encoded experiences, in this table or, after a dot, in the table next to it; empty: none."""

    @classmethod
    def of(cls, database: sqlite3.Connection, name: str, names: Sequence[str]) -> _Buffer | None:
        """Return the buffer in a table; None if the table is not a buffer, or holds the encoded experiences of another
        table.
        """
        if name.removesuffix("_blob") != name and name.removesuffix("_blob") in names:
            return None
        columns = _columns(database, name)
        blobs = next((column for column in BLOBS if column in columns), "")
        if not blobs and f"{name}_blob" in names and BLOBS[0] in _columns(database, f"{name}_blob"):
            blobs = f"blob.{BLOBS[0]}"
        return cls(name, columns, blobs) if blobs or RECORDS.keys() & set(columns) else None

    @property
    def file_name(self) -> str:
        """The name of the table as a part of a file name."""
        return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.name)

    def convert(
        self, database: sqlite3.Connection, start: Path, compression: Compression, *, strict: bool, per_file: int
    ) -> Iterator[tuple[Path, Outcome]]:
        """Write the files of the buffer, whose names begin with the name of ``start``; yield each with its outcome."""
        target = f"{start.name}-{self.file_name}"
        if keys := {column: key for column, key in RECORDS.items() if column in self.columns}:
            rows = self._rows(database, list(keys))
            yield _write_records(start.with_name(f"{target}.jsonl"), rows, list(keys.values()), strict)
        if self.blobs:
            stored = [column for column in _STORED if column in self.columns]
            rows = self._rows(database, [self.blobs, *stored])
            for number, part in enumerate(iter(lambda: list(islice(rows, per_file)), []), start=1):
                path = start.with_name(f"{target}-{number:05}{SUFFIX}")
                yield _write_rows(path, part, stored, compression, strict)

    def _rows(self, database: sqlite3.Connection, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        table = _quoted(self.name)
        listed = ", ".join(
            f"blobs.{_quoted(column.partition('.')[2])}" if "." in column else f"meta.{_quoted(column)}"
            for column in columns
        )
        other = f"LEFT JOIN {_quoted(self.name + '_blob')} blobs ON blobs.id = meta.id" if "." in self.blobs else ""
        return database.execute(f"SELECT {listed} FROM {table} meta {other} ORDER BY meta.id")  # names are quoted


_STORED = ("task_id", "run_id", "msg_id", "reward", "model_version")
"""Columns of a table of experiences that Trinity-RFT may have changed after it encoded the experience."""


def _quoted(name: str) -> str:
    """Return a name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in database.execute(f"PRAGMA table_info({_quoted(table)})")]


def _write_records(
    path: Path, rows: Iterator[tuple[Any, ...]], keys: Sequence[str | None], strict: bool
) -> tuple[Path, Outcome]:
    """Write a JSON line per row."""
    outcome, lines = Outcome(), list[bytes]()
    for number, row in enumerate(rows):
        outcome.read += 1
        try:
            values = [None if text is None else json.loads(text) for text in row]
            record = values[0] if keys[0] is None else dict(zip(keys, values, strict=True))
            lines.append(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
        except (ValueError, TypeError, RecursionError) as error:  # UTF-8 cannot encode half a surrogate pair
            outcome.skipped.append(f"row {number}: its JSON cannot be read: {error}")
    return path, _write(path, outcome, lines, lambda: b"".join(lines), strict=strict)


def _write_rows(
    path: Path,
    rows: Sequence[tuple[Any, ...]],
    stored: Sequence[str],
    compression: Compression,
    strict: bool,
) -> tuple[Path, Outcome]:
    """Write a body of the experiences in some rows."""
    from trinity_mq.experience import DecodeError, encode

    results = list[Any]()
    for number, (blob, *values) in enumerate(rows):
        try:
            results.append(_stored_experience(blob, dict(zip(stored, values, strict=True))))
        except DecodeError as error:
            results.append(DecodeError(f"row {number}: {error}"))
    outcome, good = _good_ones(results)
    return path, _write(path, outcome, good, lambda: encode(good, compression=compression), strict=strict)


def _stored_experience(blob: Any, values: dict[str, Any]) -> Experience:
    """Return the encoded experience of a row, with the values of the columns.

    Raises:
        DecodeError: The row has no encoded experience, or it cannot be read.
    """
    from trinity_mq.experience import EID, DecodeError
    from trinity_mq.experience.legacy.reader import read_legacy

    if not isinstance(blob, bytes):
        raise DecodeError("it has no encoded experience")
    experiences = read_legacy(blob)
    if len(experiences) != 1:
        raise DecodeError(f"it encodes {len(experiences)} experiences, wanted one")
    (experience,) = experiences
    eid, task = experience.eid, values.get("task_id")
    try:
        experience.eid = EID(
            batch=eid.batch,
            task=eid.task if task is None or task == str(eid.task) else task,
            run=eid.run if values.get("run_id") is None else int(values["run_id"]),
            step=eid.step,
            suffix=values.get("msg_id") or eid.suffix,
        )
    except (ValueError, TypeError, OverflowError) as error:  # SQLite keeps any type in any column
        raise DecodeError(f"its ids cannot be used: {error}") from error
    if "reward" in values:
        experience.reward = values["reward"]
    if values.get("model_version") is not None:
        experience.info["model_version"] = values["model_version"]
    return experience
