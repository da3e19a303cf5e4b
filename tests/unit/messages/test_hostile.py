"""Bodies made to confuse or to exhaust: refused quickly, with a reason, for little memory."""

from __future__ import annotations

import json
import time
import tracemalloc

import msgpack
import pytest

from trinity_mq.messages import JSON_CONTENT_TYPE, DecodeError, Metrics, TaskSubmission, decode, decode_any

MIB = 1 << 20


def packed_pairs(*pairs: tuple[str, object]) -> bytes:
    """Return a msgpack map in which a key may come twice."""
    return bytes([0x80 + len(pairs)]) + b"".join(msgpack.packb(key) + msgpack.packb(item) for key, item in pairs)


def submission(raw: bytes) -> bytes:
    """Return a submission with ``raw`` as the packed value of a key of its record."""
    return b"".join(
        (
            packed_pairs(("kind", "task_submission"), ("task", {})).replace(b"\xa4task\x80", b"\xa4task\x81"),
            msgpack.packb("raw_task") + b"\x81" + msgpack.packb("x") + raw,
        )
    )


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (packed_pairs(("kind", "mark"), ("nonce", "a"), ("nonce", "b")), None),
        (b'{"kind": "mark", "nonce": "a", "nonce": "b"}', JSON_CONTENT_TYPE),
        (submission(packed_pairs(("nonce", 1), ("b", 2), ("nonce", 1))), None),
        (b'{"kind": "task_submission", "task": {"raw_task": {"nonce": 1, "nonce": 1}}}', JSON_CONTENT_TYPE),
    ],
)
def test_a_key_that_comes_twice_is_refused(body: bytes, content_type: str | None) -> None:
    with pytest.raises(DecodeError, match="the key 'nonce' is repeated in one map"):
        decode_any(body, content_type)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_that_are_no_json_are_refused_and_their_text_is_taken(literal: str) -> None:
    body = '{"kind": "metrics", "role": "trainer", "id": "t", "step": 1, "values": {"loss": VALUE}}'
    with pytest.raises(DecodeError, match=f'{literal} is not valid JSON; .* send the text "{literal}" instead'):
        decode_any(body.replace("VALUE", literal).encode(), JSON_CONTENT_TYPE)
    message = decode(body.replace("VALUE", f'"{literal}"').encode(), Metrics, JSON_CONTENT_TYPE)
    assert str(message.values["loss"]) == str(float(literal))


def test_json_numbers_up_to_64_bits_and_any_text_are_taken() -> None:
    record = {"x": [2**64 - 1, -(2**63), "\U0001f642", "\x00"]}
    body = json.dumps({"task": {"raw_task": record}}).encode()
    assert decode(body, TaskSubmission, JSON_CONTENT_TYPE).task.raw_task == record


def nested_claims(opening: bytes, levels: int) -> bytes:
    return submission(opening * levels + bytes(MIB))


@pytest.mark.parametrize(
    "body",
    [
        nested_claims(b"\xdd\x00\x08\x00\x00", 60),  # arrays within arrays, each of half a million items
        nested_claims(b"\xdd\x00\x08\x00\x00", 1000),
        nested_claims(b"\xdf\x00\x04\x00\x00\xa0", 60),  # maps within maps
        submission(b"\xdd\xff\xff\xff\xff" + bytes(MIB)),
        submission(b"\xdf\xff\xff\xff\xff" + bytes(MIB)),
        submission(b"\xdb\xff\xff\xff\xff" + bytes(MIB)),
        submission(b"\xdd\x00\x0f\xff\xff" + b"\x80" * (MIB - 1)),  # a million maps
        submission(b"\x91" * MIB),
    ],
    ids=["arrays", "deep arrays", "maps", "array", "map", "text", "many", "deep"],
)
def test_claims_cost_little_memory_and_time(body: bytes) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(DecodeError):
            decode_any(body)
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB
    assert seconds < 5  # traced; without tracing it is a tenth


def test_json_with_millions_of_lists_is_not_built() -> None:
    body = b'{"kind": "mark", "nonce": [' + b"[]," * MIB + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="more than 262144 opening brackets"):
            decode_any(body, JSON_CONTENT_TYPE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


def test_honest_large_bodies_are_read() -> None:
    record = {"tokens": list(range(100_000)), "turns": [{"n": [n]} for n in range(5_000)]}
    body = msgpack.packb({"kind": "task_submission", "task": {"raw_task": record}})
    assert decode(body, TaskSubmission).task.raw_task == record
