"""Replaces the imports of Trinity-RFT in a plug-in by imports of trinity_mq; all other bytes stay the same."""

from __future__ import annotations

import ast
import codecs
import io
import tokenize
from dataclasses import dataclass

from trinity_mq.config.trinity_imports import Rewritten, old_imports, rewritten


@dataclass(frozen=True, slots=True)
class MigratedPlugin:
    """A plug-in with other import lines."""

    source: bytes
    lines: tuple[tuple[int, str], ...]
    """Changed statements: line in the old file, and the statements that replace it."""
    missing: tuple[tuple[int, str, str], ...]
    """Names without a counterpart: line in the old file, name and reason. Their imports stay."""


class PluginSyntaxError(ValueError):
    """A plug-in is not valid Python."""


def migrate_plugin(source: bytes) -> MigratedPlugin:
    """Return the plug-in with its imports of Trinity-RFT replaced.

    Args:
        source: A Python module, in its own encoding.

    Raises:
        PluginSyntaxError: ``source`` is not valid Python.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        tree = ast.parse(source)
        mark = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
        # the parser's columns count bytes of UTF-8
        text = source.removeprefix(mark).decode(encoding).encode()
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        raise PluginSyntaxError(f"it is not valid Python: {error}") from error
    starts, end_of_line = _line_starts(text), "\r\n" if b"\r\n" in text else "\n"
    result, place = bytearray(), 0
    lines: list[tuple[int, str]] = []
    missing: list[tuple[int, str, str]] = []
    for statement in map(rewritten, old_imports(tree)):
        node = statement.node
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        missing += statement.missing
        old = text[begin:end].decode()
        new = _replaced(statement, old, text[starts[node.lineno - 1] : begin].decode(), end_of_line)
        if new != old:
            result += text[place:begin] + new.encode()
            place = end
            lines.append((node.lineno, "; ".join(statement.lines)))
    result += text[place:]
    return MigratedPlugin(mark + result.decode().encode(encoding.removesuffix("-sig")), tuple(lines), tuple(missing))


def _line_starts(source: bytes) -> list[int]:
    """Return the byte offset of each line, as the parser counts lines: a line ends with LF, CR LF or CR."""
    starts, place = [0], 0
    while place < len(source):
        if source[place : place + 2] == b"\r\n":
            place += 2
        elif source[place : place + 1] in {b"\n", b"\r"}:
            place += 1
        else:
            place += 1
            continue
        starts.append(place)
    return starts


def _replaced(statement: Rewritten, old: str, before: str, end: str) -> str:
    """Return the new text of a statement. A statement whose names all lack a counterpart stays.

    If all names stay and only the module changes, only the module is replaced, so that parentheses, comments and line
    breaks inside of the statement stay.

    Args:
        statement: The statement.
        old: Text of the statement.
        before: Text before the statement in its line: indentation, or other statements.
        end: End of a line.
    """
    node = statement.node
    if len(statement.missing) == len(node.names):
        return old
    first = ast.parse(statement.lines[0]).body[0]
    if isinstance(node, ast.ImportFrom) and isinstance(first, ast.ImportFrom) and len(statement.lines) == 1:
        pairs = [[(alias.name, alias.asname) for alias in item.names] for item in (node, first)]
        if pairs[0] == pairs[1] and str(node.module) in old:
            return old.replace(str(node.module), str(first.module), 1)
    return ((end + before) if not before.strip() else "; ").join(statement.lines)
