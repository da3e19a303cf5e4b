"""Frame of the experience body (schemas/README.md) around head and tail.

Little-endian layout:

====== ===== =================================================================
offset bytes content
====== ===== =================================================================
0      4     magic ``TMQX``
4      1     version, 1
5      1     flags: bit 0 is set if the bytes from offset 24 on are compressed
6      2     zero
8      4     CRC-32C (Castagnoli) of all following bytes, as transmitted
12     4     length of the head in bytes
16     8     length of the tail in bytes
24           head: a msgpack map, then zeros up to a multiple of 8
...          tail: a safetensors blob
====== ===== =================================================================

With bit 0 set, all bytes from offset 24 on are one zstd frame that states its content size; the lengths are from before
compression. The head is ``{"n": experiences, "columns": {name: column}, "tensors": {name: entry}}``: columns.py
describes a column, tail.py an entry, layout.py the names. The format contains no pickle.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgpack
from crc32c import crc32c

from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import short_repr
from trinity_mq.messages.codec import distinct
from trinity_mq.messages.msgpack_scan import scan

CONTENT_TYPE = "application/vnd.trinity-mq.experiences"
MAGIC = b"TMQX"
VERSION = 1
FLAG_ZSTD = 1

Compression = Literal["none", "zstd"]
Body = bytes | bytearray | memoryview

ZSTD_LEVEL = 3
MAX_EXPANSION = 32
"""Maximum size of a body as a multiple of its compressed bytes, because a reader allocates the claimed size."""
FREE_EXPANSION = 64 * 1024
"""Bytes that a body may have in addition to ``MAX_EXPANSION`` times its compressed bytes."""

QUICK_HEAD, QUICK_COLUMNS = 64 * 1024, 128
"""A head of up to this many bytes, with maps of up to this many items, is decoded without a scan first: its maps claim
a megabyte at worst.
"""

_FRAME = struct.Struct("<4sBBHIIQ")
_LENGTHS = struct.Struct("<IQ")
_CHECKED_FROM = 12


def encode_frame(content: dict[str, Any], tail: list[Any], compression: Compression = "none") -> bytes:
    """Return head and tail as one body.

    Raises:
        EncodeError: The head is too long, or ``compression`` is unknown.
    """
    head: bytes = msgpack.packb(content, use_bin_type=True)
    if len(head) >= 1 << 32:
        raise EncodeError(f"the head has {len(head)} bytes, wanted less than 4 GiB; send fewer experiences at once")
    lengths = _LENGTHS.pack(len(head), sum(memoryview(piece).nbytes for piece in tail))
    pieces = [head, b"\0" * (-len(head) % 8), *tail]
    flags = 0
    if compression == "zstd":
        packed = _compressed(b"".join(pieces))
        if packed is not None:
            pieces, flags = [packed], FLAG_ZSTD
    elif compression != "none":
        raise EncodeError(f"compression is {compression!r}, wanted none or zstd")
    checksum = crc32c(lengths)
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    return b"".join([struct.pack("<4sBBHI", MAGIC, VERSION, flags, 0, checksum), lengths, *pieces])


def _compressed(plain: bytes) -> bytes | None:
    """Return ``plain`` compressed; None if that saves nothing or if a reader would refuse it."""
    import zstandard

    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(plain)
    fits = len(plain) <= MAX_EXPANSION * len(packed) + FREE_EXPANSION
    return packed if fits and len(packed) < len(plain) else None


def decode_frame(data: Body) -> tuple[dict[str, Any], memoryview]:
    """Return head and tail of a body; the tail is a view into ``data``, unless the body was compressed.

    Raises:
        DecodeError: ``data`` is not exactly one body.
    """
    view = memoryview(data).cast("B")
    head_length, tail_length, flags = _checked(view)
    tail_start = head_length + (-head_length % 8)
    content = view[_FRAME.size :]
    if flags & FLAG_ZSTD:
        content = memoryview(_expanded(content, tail_start + tail_length))
    head = _head(content[:head_length])
    if not isinstance(head, dict):
        raise DecodeError(f"the head is {short_repr(head)}, wanted a map")
    return head, content[tail_start:]


def _head(data: memoryview) -> Any:
    """Return the decoded head. A map allocates its claimed size, so large claims are accepted only after a scan."""
    try:
        if len(data) <= QUICK_HEAD:
            try:
                head = msgpack.unpackb(data, raw=False, strict_map_key=True, max_array_len=0, max_map_len=QUICK_COLUMNS)
                if msgpack.packb(head, use_bin_type=True) == data:
                    return head  # an equal encoding proves that no name is repeated; a check of each map takes longer
                return _unpacked(data, QUICK_COLUMNS)
            except ValueError:
                scan(data)
        else:
            scan(data)
        return _unpacked(data, len(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f"the head is not a msgpack map: {error or type(error).__name__}") from error


def _unpacked(data: memoryview, max_map: int) -> Any:
    return msgpack.unpackb(
        data, raw=False, strict_map_key=True, object_pairs_hook=distinct, max_array_len=0, max_map_len=max_map
    )


def _checked(view: memoryview) -> tuple[int, int, int]:
    """Return the lengths of head and tail and the flags, after all checks that need no parsing."""
    if len(view) < _FRAME.size:
        raise DecodeError(f"{len(view)} bytes, wanted an experience body of at least {_FRAME.size}")
    magic, version, flags, zero, checksum, head_length, tail_length = _FRAME.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"the body starts with {magic!r}, wanted {MAGIC!r}: not an experience body")
    if version != VERSION:
        raise DecodeError(f"experience body of version {version}, this release reads version {VERSION}")
    if flags & ~FLAG_ZSTD or zero:
        raise DecodeError(f"unknown flags {flags:#x}, {zero:#x}, wanted 0 or {FLAG_ZSTD:#x}, 0")
    expected = _FRAME.size + head_length + (-head_length % 8) + tail_length
    if not flags and expected != len(view):
        raise DecodeError(
            f"{len(view)} bytes, wanted {expected}: head of {head_length}, tail of {tail_length}; cut short or "
            "followed by something else"
        )
    actual = crc32c(view[_CHECKED_FROM:])
    if actual != checksum:
        raise DecodeError(f"checksum {actual:#010x}, wanted {checksum:#010x}: the body was damaged or cut on its way")
    return head_length, tail_length, flags


def _expanded(packed: memoryview, expected: int) -> bytes:
    """Return the decompressed bytes, ``expected`` in number. An excessive claim is refused before decompression."""
    import zstandard

    if expected > MAX_EXPANSION * len(packed) + FREE_EXPANSION:
        raise DecodeError(
            f"{len(packed)} compressed bytes claim to be {expected}, wanted at most {MAX_EXPANSION} times as many and "
            f"{FREE_EXPANSION} more"
        )
    try:
        claimed = zstandard.frame_content_size(packed)
        if claimed != expected:
            raise DecodeError(f"the zstd frame claims {claimed} bytes, wanted {expected} as the lengths say")
        plain: bytes = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"not a valid zstd frame: {error}") from error
    if len(plain) != expected:
        raise DecodeError(f"the zstd frame holds {len(plain)} bytes, wanted {expected}")
    return plain
