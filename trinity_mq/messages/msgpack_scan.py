"""Limits on the content of messages. Counts the containers of a msgpack document and their nesting without building
values, and names the path of a value that a message cannot hold.

A msgpack reader allocates the claimed length of an array before it reads the items, level after level. So a few
kilobytes of nested claims cost gigabytes. Documents with few containers are safe: :func:`measure` detects them at the
speed of C and walks all other documents.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack

MAX_NESTING = 64
"""Maximum depth of containers within containers."""

MAX_CONTAINERS = 1 << 18
"""Maximum number of containers in one document: each costs a reader far more memory than its single byte."""

QUICK_ARRAY_LENGTH = 256
"""Arrays up to this length are safe without a walk: :data:`MAX_NESTING` nested arrays of this length claim 128 KiB."""

_SCALAR, _ARRAY, _MAP, _INVALID = range(4)


def _table() -> list[tuple[int, int, int]]:
    """Return for each first byte: kind, bytes of the length field, and fixed payload (or fixed count)."""
    table = [(_SCALAR, 0, 0)] * 256
    for byte in range(0x80, 0x90):
        table[byte] = (_MAP, 0, byte & 0x0F)
    for byte in range(0x90, 0xA0):
        table[byte] = (_ARRAY, 0, byte & 0x0F)
    for byte in range(0xA0, 0xC0):
        table[byte] = (_SCALAR, 0, byte & 0x1F)
    table[0xC1] = (_INVALID, 0, 0)
    sizes = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str
    table[0xC4:0xC7] = [(_SCALAR, sizes[byte], 0) for byte in range(0xC4, 0xC7)]
    table[0xC7:0xCA] = [(_SCALAR, size, 1) for size in (1, 2, 4)]  # ext: one more byte for its type
    table[0xCA:0xCC] = [(_SCALAR, 0, size) for size in (4, 8)]  # float
    table[0xCC:0xD4] = [(_SCALAR, 0, size) for size in (1, 2, 4, 8) * 2]  # uint, int
    table[0xD4:0xD9] = [(_SCALAR, 0, size + 1) for size in (1, 2, 4, 8, 16)]  # fixext
    table[0xD9:0xDC] = [(_SCALAR, sizes[byte], 0) for byte in range(0xD9, 0xDC)]
    table[0xDC:0xE0] = [(_ARRAY, 2, 0), (_ARRAY, 4, 0), (_MAP, 2, 0), (_MAP, 4, 0)]
    return table


_TABLE = _table()
_NO_CONTAINER = bytes(byte for byte in range(256) if _TABLE[byte][0] not in {_ARRAY, _MAP})


def container_bytes(document: bytes) -> int:
    """Return how many bytes look like the first byte of a list or map. This is an upper bound of their number."""
    return len(document.translate(None, _NO_CONTAINER))


def is_whole(document: bytes) -> bool:
    """Return whether these bytes are exactly one complete msgpack document, at the speed of C and without building
    values. The document may nest deeper than :data:`MAX_NESTING`.
    """
    reader = msgpack.Unpacker(max_buffer_size=len(document) + 1)
    reader.feed(document)
    try:
        reader.skip()
    except (ValueError, msgpack.UnpackException):
        return False
    return bool(reader.tell() == len(document))


def measure(document: bytes) -> int:
    """Return an upper bound of the containers in a msgpack document.

    Raises:
        ValueError: The document nests deeper than :data:`MAX_NESTING`, or is not complete. Documents with at most
            :data:`MAX_NESTING` containers are not checked.
    """
    bound = container_bytes(document)
    return bound if bound <= MAX_NESTING else scan(document)


def scan(document: bytes | memoryview) -> int:
    """Return the number of containers in exactly one msgpack document.

    Raises:
        ValueError: The document nests deeper than :data:`MAX_NESTING`, has more than :data:`MAX_CONTAINERS`, is cut
            short, claims more items than it has or is followed by other bytes.
    """
    size, position, containers = len(document), 0, 0
    remaining = remaining_in_all = 1  # remaining items: on this level, on all levels
    outer_levels: list[int] = []  # remaining items of the outer levels
    while remaining or outer_levels:
        if not remaining:
            remaining = outer_levels.pop()
            continue
        if position >= size:
            raise ValueError(f"truncated at offset {position}")
        kind, width, fixed = _TABLE[document[position]]
        position += 1
        remaining -= 1
        remaining_in_all -= 1
        length = fixed
        if width:
            length += int.from_bytes(document[position : position + width], "big")
            position += width
        if kind == _SCALAR:
            position += length
            continue
        if kind == _INVALID:
            raise ValueError(f"invalid byte 0xc1 at offset {position - 1}")
        containers += 1
        if len(outer_levels) >= MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        if containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")
        length *= 2 if kind == _MAP else 1
        remaining_in_all += length
        if remaining_in_all > size - position:
            raise ValueError(
                f"the container at offset {position} claims {length} items, {size - position} bytes are left"
            )
        outer_levels.append(remaining)
        remaining = length
    if position != size:
        raise ValueError(f"{size} bytes, wanted {position}")
    return containers


LEAST_INTEGER, GREATEST_INTEGER = -(1 << 63), (1 << 64) - 1
"""Range of integers that MessagePack holds."""
LONGEST_NAME = 40
"""Maximum characters of each name in the path of a value."""
ATOMS = frozenset({str, bytes, int, float, bool, type(None)})
"""The common types that do not contain other values."""


class ContentError(ValueError):
    """A value that a message cannot hold, or content that a reader refuses. The text names the path of the value."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []

    @property
    def where(self) -> str:
        """Path of the value, such as ``messages.0.content``; empty for the body itself."""
        return ".".join(self.path)

    def __str__(self) -> str:
        """Return the path and the problem."""
        return f"{self.where}: {super().__str__()}" if self.path else super().__str__()


def check_value(value: Any, depth: int = MAX_NESTING, *, finite: bool = False) -> None:
    """Check that a message can hold a value.

    Args:
        value: The value.
        depth: Maximum levels of lists and maps.
        finite: Refuse numbers that are not finite, because JSON cannot hold them.

    Raises:
        ContentError: The value contains an integer beyond 64 bits, half a surrogate pair, a key that is not text, a
            value of a type that messages cannot hold, more than ``depth`` levels, or a number that ``finite`` refuses.
    """
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int):
        if not LEAST_INTEGER <= value <= GREATEST_INTEGER:
            raise ContentError(f"an integer of {int(value).bit_length()} bits, wanted one of at most 64")
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ContentError(f"{value}, wanted a finite number")
    elif isinstance(value, dict | list | tuple):
        if depth == 0:
            raise ContentError(f"more than {MAX_NESTING} levels of lists and objects")
        _check_items(value, depth - 1, finite)
    elif value is not None and not isinstance(value, bytes | bytearray | memoryview):
        raise ContentError(f"a {type(value).__name__}, wanted text, bytes, a number, a list or a map")


def _check_items(value: dict[Any, Any] | list[Any] | tuple[Any, ...], depth: int, finite: bool) -> None:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        try:
            if isinstance(key, str):
                _check_text(key)
            elif isinstance(value, dict) and not isinstance(key, bytes):
                raise ContentError(f"a key that is a {type(key).__name__}, wanted text")
            check_value(item, depth, finite=finite)
        except ContentError as problem:
            problem.path.insert(0, str(key).encode("ascii", "backslashreplace").decode()[:LONGEST_NAME])
            raise


def repair_surrogates(text: str) -> str:
    r"""Return an encodable text: each surrogate pair becomes its character, and each lone half of a pair becomes
    U+FFFD.

    >>> repair_surrogates("\ud83d\ude00, \ud83d")
    '\U0001f600, \ufffd'
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ContentError(f"half a surrogate pair at character {error.start}, wanted Unicode text") from None


def is_within_limits(value: Any, depth: int) -> bool:
    """Return whether a value that msgpack packed has at most ``depth`` levels, and only text or bytes as keys. If
    False, the value may still pass the slower :func:`check_value`.
    """
    if not isinstance(value, dict | list | tuple):
        return True
    if depth == 0 or (isinstance(value, dict) and not {str, bytes}.issuperset(map(type, value))):
        return False
    items = value.values() if isinstance(value, dict) else value
    return ATOMS.issuperset(map(type, items)) or all(is_within_limits(item, depth - 1) for item in items)
