"""Looks up the sequences with which another sequence begins, by digests, in linear time."""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

TOKEN_BYTES = 4
"""Bytes of a token id."""
_DIGEST_BYTES = 16
T = TypeVar("T")


class Beginnings(Generic[T]):
    """Stores each item under the digest of a byte sequence, and finds all items whose bytes are the beginning of
    another sequence, or all of it.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._digests: Counter[int] = Counter()
        """Number of items, by the size of their bytes."""
        self._items: dict[bytes, list[T]] = {}

    def add(self, size: int, digest: bytes, item: T) -> None:
        """Add an item whose byte sequence has this size and this digest."""
        if not self._digests[size]:
            bisect.insort(self._sizes, size)
        self._digests[size] += 1
        self._items.setdefault(digest, []).append(item)

    def remove(self, size: int, digest: bytes, item: T) -> None:
        """Remove an item that was added."""
        self._items[digest].remove(item)
        self._digests[size] -= 1
        if not self._items[digest]:
            del self._items[digest]
        if not self._digests[size]:
            self._sizes.remove(size)

    def of(self, content: bytes, state: hashlib.blake2b | None = None, size: int = 0) -> list[list[T]]:
        """Return the items whose byte sequences are beginnings of the given bytes. Each inner list holds the items of
        equal sequences; short sequences come first.

        Args:
            content: The bytes, without the first ``size`` bytes.
            state: Digest of the first ``size`` bytes. None: an empty digest.
            size: Number of bytes before ``content``. Only items with more bytes are returned.
        """
        state, end, matches = new_state() if state is None else state.copy(), 0, []
        view = memoryview(content)
        for place in range(bisect.bisect_right(self._sizes, size), len(self._sizes)):
            stop = self._sizes[place] - size
            if stop > len(content):
                break
            state.update(view[end:stop])
            end = stop
            if items := self._items.get(state.digest()):
                matches.append(items)
        return matches


def new_state(kind: bytes = b"") -> hashlib.blake2b:
    """Return the state of an empty digest. Digests of different kinds are never equal."""
    return hashlib.blake2b(kind, digest_size=_DIGEST_BYTES)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, four for each.

    Raises:
        ValueError: A token id is not a whole number of at most 31 bits.
    """
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids: {error}; wanted whole numbers of at most 31 bits") from None
