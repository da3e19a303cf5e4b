"""Experiences to bytes and back: the experience body of protocol.md section 3.

Little-endian layout:

====== ===== =================================================================
offset bytes content
====== ===== =================================================================
0      4     magic ``TMQX``
4      1     version, 1
5      1     flags: bit 0 is reserved for zstd, the others are 0
6      2     zero
8      4     CRC-32 of everything after it
12     4     length of the head
16     8     length of the tail
24           head: a msgpack map, then zeros up to a multiple of 8
...          tail: a safetensors blob
====== ===== =================================================================

The head is ``{"n": experiences, "columns": {name: column}, "tensors": {name: entry}}``: columns.py describes a column,
tail.py an entry, layout.py the names. No pickle. Decoded tensors are views into one private copy of the tail: they may
be written to, and each keeps the whole tail alive.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgpack

from trinity_mq.experience.assemble import MAX_EXPERIENCES, assemble
from trinity_mq.experience.disassemble import disassemble
from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.experience import Experience
from trinity_mq.experience.fields import short
from trinity_mq.experience.tail import distinct, read_tail

CONTENT_TYPE = "application/vnd.trinity-mq.experiences"
MAGIC = b"TMQX"
VERSION = 1
FLAG_ZSTD = 1

_FRAME = struct.Struct("<4sBBHIIQ")
_CHECKED_FROM = 12


def encode(experiences: Sequence[Experience]) -> bytes:
    """Return ``experiences`` as one body.

    Fields are checked as the constructor checks them, since they may have been assigned since.

    Raises:
        EncodeError: A field breaks a rule or does not fit the format; the message names experience, field and key.
    """
    if len(experiences) > MAX_EXPERIENCES:
        raise EncodeError(f"{len(experiences)} experiences, wanted at most {MAX_EXPERIENCES} in one body; send several")
    content, tail = disassemble(experiences)
    head: bytes = msgpack.packb(content, use_bin_type=True)
    if len(head) >= 1 << 32:
        raise EncodeError(f"the head has {len(head)} bytes, wanted less than 4 GiB; send fewer experiences at once")
    pieces = [head, b"\0" * (-len(head) % 8), *tail]
    lengths = struct.pack("<IQ", len(head), sum(memoryview(piece).nbytes for piece in tail))
    checksum = zlib.crc32(lengths)
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([struct.pack("<4sBBHI", MAGIC, VERSION, 0, 0, checksum), lengths, *pieces])


def decode(data: bytes | bytearray | memoryview) -> list[Experience]:
    """Return the experiences in ``data``.

    Raises:
        DecodeError: ``data`` is anything else than exactly one body that :func:`encode` could have made.
    """
    view = memoryview(data).cast("B")
    head_length, tail_start = _frame(view)
    try:
        head = msgpack.unpackb(
            view[_FRAME.size : _FRAME.size + head_length],
            raw=False,
            strict_map_key=True,
            object_pairs_hook=distinct,
            max_array_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f"the head is not the msgpack map wanted: {error or type(error).__name__}") from error
    if not isinstance(head, dict):
        raise DecodeError(f"the head is {short(head)}, wanted a map")
    return assemble(head, read_tail(bytearray(view[tail_start:])))


def _frame(view: memoryview) -> tuple[int, int]:
    """Return the length of the head and where the tail starts, after all checks that need no parsing."""
    if len(view) < _FRAME.size:
        raise DecodeError(f"{len(view)} bytes, wanted an experience body of at least {_FRAME.size}")
    magic, version, flags, zero, checksum, head_length, tail_length = _FRAME.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"the body starts with {magic!r}, wanted {MAGIC!r}: not an experience body")
    if version != VERSION:
        raise DecodeError(f"experience body of version {version}, this release reads version {VERSION}")
    if flags == FLAG_ZSTD:
        raise DecodeError("the body is compressed with zstd, which this release does not read; send it uncompressed")
    if flags or zero:
        raise DecodeError(f"unknown flags {flags:#x}, {zero:#x}, wanted 0")
    tail_start = _FRAME.size + head_length + (-head_length % 8)
    if tail_start + tail_length != len(view):
        raise DecodeError(
            f"{len(view)} bytes, wanted {tail_start + tail_length}: head of {head_length}, tail of {tail_length}; "
            "cut short or followed by something else"
        )
    found = zlib.crc32(view[_CHECKED_FROM:])
    if found != checksum:
        raise DecodeError(f"checksum {found:#010x}, wanted {checksum:#010x}: the body was damaged on its way")
    return head_length, tail_start


__all__ = ["CONTENT_TYPE", "DecodeError", "EncodeError", "decode", "encode"]
