"""Checks that a message can hold a value, and names the path of a value that it cannot hold."""

from __future__ import annotations

import math
from typing import Any

from trinity_mq.messages.msgpack_scan import MAX_NESTING

LEAST_INTEGER, GREATEST_INTEGER = -(1 << 63), (1 << 64) - 1
"""Range of integers that MessagePack holds."""
LONGEST_NAME = 40
"""Characters of a name that the path of a value shows."""
ATOMS = frozenset({str, bytes, int, float, bool, type(None)})
"""Types of most values that hold no other values."""


class ContentError(ValueError):
    """A value that no message can hold, or content that is not taken; the text names the path of the value."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []

    @property
    def where(self) -> str:
        """Path of the value, such as ``messages.0.content``; empty: the body itself."""
        return ".".join(self.path)

    def __str__(self) -> str:
        """Return the problem after the path."""
        return f"{self.where}: {super().__str__()}" if self.path else super().__str__()


def check_value(value: Any, depth: int = MAX_NESTING, *, finite: bool = False) -> None:
    """Check that a message can hold a value.

    Args:
        value: The value.
        depth: Levels of lists and maps that it may have.
        finite: Refuse numbers that are not finite: JSON has none.

    Raises:
        ContentError: It holds an integer beyond 64 bits, half a surrogate pair, a key that is not text, a value of a
            type that does not travel, more than ``depth`` levels, or a number that ``finite`` refuses.
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


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ContentError(f"half a surrogate pair at character {error.start}, wanted Unicode text") from None


def is_plain(value: Any, depth: int) -> bool:
    """Return whether a value that msgpack packed has at most ``depth`` levels, and text or bytes as keys only. A value
    of which this is False may still pass :func:`check_value`, which is slower.
    """
    if not isinstance(value, dict | list | tuple):
        return True
    if depth == 0 or (isinstance(value, dict) and not {str, bytes}.issuperset(map(type, value))):
        return False
    items = value.values() if isinstance(value, dict) else value
    return ATOMS.issuperset(map(type, items)) or all(is_plain(item, depth - 1) for item in items)
