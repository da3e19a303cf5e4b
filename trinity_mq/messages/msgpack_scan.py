"""Counts the containers of a msgpack document and their nesting without building any of it.

A msgpack reader allocates what an array claims to hold before it reads the items, level after level, so a few kilobytes
of nested claims cost gigabytes. Documents with few containers are safe as they are: :func:`measure` tells them apart at
the speed of C and walks the others.
"""

from __future__ import annotations

import msgpack

MAX_NESTING = 64
"""Containers within containers."""

MAX_CONTAINERS = 1 << 18
"""Containers in one document: each costs a reader far more memory than its one byte."""

QUICK_ARRAY_LENGTH = 256
"""Arrays up to this length need no walk: :data:`MAX_NESTING` claims of it are 128 KiB."""

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
    table[0xC7:0xCA] = [(_SCALAR, size, 1) for size in (1, 2, 4)]  # ext: one more byte, its type
    table[0xCA:0xCC] = [(_SCALAR, 0, size) for size in (4, 8)]  # float
    table[0xCC:0xD4] = [(_SCALAR, 0, size) for size in (1, 2, 4, 8) * 2]  # uint, int
    table[0xD4:0xD9] = [(_SCALAR, 0, size + 1) for size in (1, 2, 4, 8, 16)]  # fixext
    table[0xD9:0xDC] = [(_SCALAR, sizes[byte], 0) for byte in range(0xD9, 0xDC)]
    table[0xDC:0xE0] = [(_ARRAY, 2, 0), (_ARRAY, 4, 0), (_MAP, 2, 0), (_MAP, 4, 0)]
    return table


_TABLE = _table()
_NO_CONTAINER = bytes(byte for byte in range(256) if _TABLE[byte][0] not in {_ARRAY, _MAP})


def container_bytes(document: bytes) -> int:
    """Return how many bytes look like the first one of a list or map: never fewer than there are of those."""
    return len(document.translate(None, _NO_CONTAINER))


def is_whole(document: bytes) -> bool:
    """Return whether these bytes are exactly one msgpack document that holds all it claims to hold, at the speed of C
    and without building any of it. It may nest deeper than :data:`MAX_NESTING`.
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
        ValueError: It nests deeper than :data:`MAX_NESTING`, or is no complete document; not looked for where the
            document has at most that many containers.
    """
    bound = container_bytes(document)
    return bound if bound <= MAX_NESTING else scan(document)


def scan(document: bytes | memoryview) -> int:
    """Return the number of containers in exactly one msgpack document.

    Raises:
        ValueError: It nests deeper than :data:`MAX_NESTING`, has more than :data:`MAX_CONTAINERS`, is cut short, claims
            more than it has or is followed by more.
    """
    size, position, containers = len(document), 0, 0
    left = owed = 1  # items still to come on this level, on all levels
    above: list[int] = []  # the same of the levels above
    while left or above:
        if not left:
            left = above.pop()
            continue
        if position >= size:
            raise ValueError(f"cut short at byte {position}")
        kind, width, fixed = _TABLE[document[position]]
        position += 1
        left -= 1
        owed -= 1
        length = fixed
        if width:
            length += int.from_bytes(document[position : position + width], "big")
            position += width
        if kind == _SCALAR:
            position += length
            continue
        if kind == _INVALID:
            raise ValueError(f"byte 0xc1 at {position - 1}")
        containers += 1
        if len(above) >= MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        if containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")
        length *= 2 if kind == _MAP else 1
        owed += length
        if owed > size - position:
            raise ValueError(f"a container at byte {position} claims {length} items, {size - position} bytes are left")
        above.append(left)
        left = length
    if position != size:
        raise ValueError(f"{size} bytes, wanted {position}")
    return containers
