"""Experience bodies out of arbitrary bytes: damaged somewhere, but right where that lets the damage be seen.

A fuzzer that only flips bits never gets past the checksum. Here its bytes become heads, tails, documents and edits of
real bodies, and the frame around them is made right.
"""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
import zstandard
from crc32c import crc32c

from trinity_mq.experience import EID, CustomField, Experience, encode

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
FRAME = struct.Struct("<4sBBHIIQ")
PLAIN, ZSTD = 0, 1


class Choices:
    """Bytes as a row of choices; zeros where they end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def word(self) -> int:
        return self.byte() << 8 | self.byte()

    def of(self, options: Any) -> Any:
        return options[self.word() % len(options)]

    def some(self) -> bytes:
        """Return a few bytes as they are."""
        count = self.byte() % 24
        part = self._data[self._at : self._at + count]
        self._at += count
        return part


def sealed(head: bytes, tail: bytes, *, flags: int = PLAIN, damage: bytes | None = None) -> bytes:
    """Return head and tail in a right frame; ``damage`` goes in place of what zstd makes of them."""
    content = head + bytes(-len(head) % 8) + tail
    if flags == ZSTD:
        content = zstandard.ZstdCompressor().compress(content) if damage is None else damage
    rest = struct.pack("<IQ", len(head), len(tail)) + content
    return struct.pack("<4sBBHI", b"TMQX", 1, flags, 0, crc32c(rest)) + rest


def resealed(body: bytes) -> bytes:
    """Return ``body`` with a right magic, version and checksum, and lengths that add up where they can."""
    if len(body) < FRAME.size:
        return body
    flags, (head, _) = body[5] & ZSTD, struct.unpack_from("<IQ", body, 12)
    tail = len(body) - FRAME.size - head - -head % 8
    lengths = struct.pack("<IQ", head, tail) if flags == PLAIN and tail >= 0 else body[12:24]
    rest = lengths + body[24:]
    return struct.pack("<4sBBHI", b"TMQX", 1, flags, 0, crc32c(rest)) + rest


def opened(body: bytes) -> tuple[Any, bytes]:
    """Return head and tail of a right body."""
    _, _, flags, _, _, head, _ = FRAME.unpack_from(body)
    content = zstandard.ZstdDecompressor().decompress(body[24:]) if flags == ZSTD else body[24:]
    return msgpack.unpackb(content[:head]), content[head + -head % 8 :]


@cache
def seeds() -> tuple[bytes, ...]:
    """Return real experience bodies: the golden ones, and some that together have every kind of column and entry."""
    given = [
        Experience(
            eid=EID("a/b" if number else 3, number, number, 0, f"s{number}"),
            tokens=[1, 2, 3, 4 + number],
            prompt_length=2,
            logprobs=torch.tensor([-1.0, -2.0], dtype=(torch.float32, torch.bfloat16)[number % 2]),
            action_mask=[True, False] if number == 1 else None,
            reward=None if number else 0.5,
            info={"a": [1, {"b": None}], "t": torch.ones(2), "n": np.zeros((1, 2))} if number else {},
            metrics={"m": 0.5},
            messages=[{"role": "user", "content": "é"}] if number else None,
            prompt_text=f"text {number % 2}",
            versions=[(0, 1, number), (1, 1, 9)],
            custom_fields=[CustomField("a", "b", torch.int64)] if number else [],
            multi_modal_inputs={"p": torch.ones(number, 2), "s": torch.tensor(number)} if number else None,
            routed_experts=torch.ones(3, 1, 2, dtype=torch.uint8),
            temperature=1.0,
            index=number,
        )
        for number in range(3)
    ]
    pair = Experience(eid=EID(1, 2, 0, 0, "x"), tokens=[1, 2], chosen=[3], rejected=[4, 5])
    cut = Experience(tokens=[1, 2], prompt_length=2, logprobs=[0.0], truncate_status="prompt_truncated")
    golden = sorted((GOLDEN / "experiences").glob("*.tmqx"))
    made = [encode(given), encode([pair, cut, *given]), encode([]), encode(given, compression="zstd")]
    return (*made, *(path.read_bytes() for path in golden))


VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 255, 1 << 16, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.5, float("nan"), True, None),
    *("", "a", "dpo", "multi_turn", "prompt_truncated", "tokens", "chosen", "documents", "logprobs", "é" * 30),
    *(b"", b"\0" * 4, b"\xff" * 4, b"\xff" * 12, b"\1\0\0\0" * 3, b"\0" * 24, [], {}, [1], {"c": 1}, {"c": "a"}),
    *({"i": bytes(24)}, {"f": bytes(24), "n": b"\0\1\0"}, {"s": b"abc", "l": b"\1\0\0\0" * 3}, {"d": b"", "l": b""}),
)
HEADER_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 4, 8, 1 << 31, 1 << 62, 1 << 70, None, "I32", "BF16", "BOOL", "F64", "F8_E4M3", "C64", [], {}, [0, 0]),
    *([0, 8], [1, 2], [2, 0], [1 << 40, 1 << 40], [0, 1 << 61]),
)


def edited(data: bytes) -> bytes:
    """Return a real body after a few edits of what its head and the header of its tail say, in a right frame."""
    choices = Choices(data)
    head, tail = opened(choices.of(seeds()))
    flags = choices.byte() % 2
    for _ in range(1 + choices.byte() % 4):
        what = choices.byte() % 4
        if what == 0:
            tail = _edited_tail(tail, choices)
        elif what == 1 and len(tail) > 8:
            tail = _edited_bytes(tail, choices)
        else:
            head = _edited_tree(head, choices, VALUES)
    try:
        packed = msgpack.packb(head)
    except (ValueError, OverflowError):  # an edit that msgpack has no form for
        packed = b"\x80"
    return sealed(packed, tail, flags=flags)


def _edited_tail(tail: bytes, choices: Choices) -> bytes:
    if len(tail) < 8:  # an edit before this one has left no header
        return tail
    (size,) = struct.unpack_from("<Q", tail)
    try:
        header = json.loads(tail[8 : 8 + size])
    except ValueError:
        return tail
    text = json.dumps(_edited_tree(header, choices, HEADER_VALUES)).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tail[8 + size :]


def _edited_bytes(data: bytes, choices: Choices) -> bytes:
    at, what = choices.word() % (len(data) + 1), choices.byte() % 4
    if what == 0:
        return data[:at] + choices.some() + data[at:]
    if what == 1:
        return data[:at] + data[at + choices.byte() % 9 :]
    part = choices.some() if what == 2 else struct.pack("<i", choices.of((-2, -1, 0, 1, 2, 3, 1 << 30)))
    return data[:at] + part + data[at + len(part) :]


def _edited_tree(tree: Any, choices: Choices, values: tuple[Any, ...]) -> Any:
    """Return ``tree`` with one node somewhere replaced, removed, renamed or damaged."""
    if isinstance(tree, dict | list) and len(tree) and choices.byte() % 8:
        key = choices.of(sorted(tree) if isinstance(tree, dict) else range(len(tree)))
        tree = dict(tree) if isinstance(tree, dict) else list(tree)
        what = choices.byte() % 12
        if what == 0:
            del tree[key]
        elif what == 1 and isinstance(tree, dict):
            tree[choices.of(("x", "tokens", "info", "c", "k", "n", "key", "scalar"))] = tree.pop(key)
        elif what == 2 and isinstance(tree, dict):
            tree[choices.of(("x", "c", "k", "n", "i", "scalar", "key"))] = choices.of(values)
        else:
            tree[key] = _edited_tree(tree[key], choices, values)
        return tree
    if isinstance(tree, bytes) and choices.byte() % 4:
        return _edited_bytes(tree, choices)
    return choices.of(values)


def with_documents(data: bytes) -> bytes:
    """Return a real body whose free-form values are ``data``."""
    head, tail = opened(seeds()[0])
    text = b"\x81\xa1a" + data
    lengths = np.array([len(text), -1, -1], dtype="<i4").tobytes()
    head["columns"]["info"] = {"d": text, "l": lengths}
    return sealed(msgpack.packb(head), tail)


def from_parts(data: bytes) -> bytes:
    """Return a right frame around a head and a tail that are nothing but ``data``."""
    cut = int.from_bytes(data[:2], "little") % (len(data) + 1)
    return sealed(data[2 : 2 + cut], data[2 + cut :])


def from_zstd(data: bytes) -> bytes:
    """Return a frame with the lengths, and what stands for zstd's output, that ``data`` gives."""
    head, tail = (data + bytes(4))[0] | (data + bytes(4))[1] << 8, int.from_bytes(data[2:5], "little")
    rest = struct.pack("<IQ", head, tail) + data[5:]
    return struct.pack("<4sBBHI", b"TMQX", 1, ZSTD, 0, crc32c(rest)) + rest
