"""Reads the records of a file in the format given by its suffix."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trinity_mq.data.errors import TasksetError

LONGEST_CELL = (1 << 31) - 1
"""Maximum characters of a cell: in effect unlimited, because the whole file is in memory."""
Located = Iterator[tuple[str, Any]]
"""The place of each record, for messages, and the record, which has not been checked yet."""


def read_file(path: Path) -> Located:
    """Return the records of ``path``, each with its place.

    Raises:
        TasksetError: The file does not exist, cannot be read, is invalid for its suffix, or has an unsupported suffix.
    """
    reader = FORMATS.get(path.suffix.lower())
    try:
        if reader is not None:
            return reader(path)
        with path.open("rb"):  # a missing file is reported before an unsupported suffix
            pass
    except OSError as error:
        raise TasksetError(f"{path} cannot be read: {error.strerror or error}") from error
    raise TasksetError(
        f"{path} ends in {path.suffix!r}, wanted one of {', '.join(FORMATS)}: convert it, or load it with "
        "storage_type: huggingface"
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TasksetError(f"{path} is not UTF-8 text: {error.reason}") from error


def _json_lines(path: Path) -> Located:
    # Only line feeds end a line: JSON strings may contain the other line breaks of splitlines().
    lines = enumerate(_text(path).split("\n"), 1)
    return ((f"{path}:{number}", _json(f"{path}:{number}", line)) for number, line in lines if line.strip())


def _json_list(path: Path) -> Located:
    rows = _json(str(path), _text(path))
    if not isinstance(rows, list):
        raise TasksetError(f"{path} holds a {type(rows).__name__}, wanted a list of records")
    return ((f"{path}[{number}]", row) for number, row in enumerate(rows))


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TasksetError(f"{where}: not JSON: {error or 'nested too deep'}") from error


def _separated(path: Path) -> Located:
    csv.field_size_limit(LONGEST_CELL)  # the limit is global to the process
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    return _rows(path, csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True))


def _rows(path: Path, reader: Any) -> Located:
    """Return each row as a record of texts, with names from the first row. Rows without cells are skipped."""
    names: list[str] | None = None
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if names is None:
                names = row
                if len(set(names)) < len(names):
                    raise TasksetError(f"{where}: the columns are {', '.join(names)}, wanted each name once")
            elif row and len(row) != len(names):
                raise TasksetError(
                    f"{where}: has {len(row)} cells, wanted {len(names)}, one for each column of the first line; a "
                    'cell with a separator or a line break in it stands in "quotes"'
                )
            elif row:
                yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise TasksetError(f"{path}:{reader.line_num}: cannot be read as CSV: {error}") from error


def _parquet(path: Path) -> Located:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TasksetError(
            f"{path}: Parquet needs the package pyarrow: pip install 'trinity-mq[parquet]', or give a JSONL file"
        ) from error
    with path.open("rb") as file:
        try:
            table = parquet.read_table(file)
        except ArrowException as error:
            raise TasksetError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from error
    columns = [_values(column) for column in table.columns]
    return (
        (f"{path}[{number}]", dict(zip(table.column_names, row, strict=True)))
        for number, row in enumerate(zip(*columns, strict=True))
    )


NO_VALUE = (ArithmeticError, LookupError, ValueError)
"""Errors of Arrow values without a Python equivalent: a date after the year 9999, an unknown time zone, nanoseconds if
pandas is not installed.
"""


def _values(column: Any) -> list[Any]:
    """Return the values of an Arrow column. Values without a Python equivalent are returned as text."""
    try:
        return list(column.to_pylist())
    except NO_VALUE:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    import pyarrow

    try:
        return scalar.as_py()
    except NO_VALUE as error:
        if isinstance(scalar, pyarrow.StructScalar):
            return {name: _value(scalar[name]) for name in scalar}
        if isinstance(scalar, pyarrow.ListScalar):
            return [_value(item) for item in scalar.values]
        try:
            return scalar.cast(pyarrow.string()).as_py()
        except pyarrow.ArrowException:
            return f"{getattr(scalar, 'value', error)}"


FORMATS: Mapping[str, Callable[[Path], Located]] = MappingProxyType(
    {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_list,
        ".csv": _separated,
        ".tsv": _separated,
        ".parquet": _parquet,
    }
)
"""Readers of the formats by file suffix."""
