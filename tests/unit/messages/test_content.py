"""Values that no message can hold: ContentError from the writer, DecodeError from every reader, and no other error."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.golden.control_cases import CASES
from trinity_mq.messages import (
    JSON_CONTENT_TYPE,
    ContentError,
    DecodeError,
    Metrics,
    SessionReward,
    TaskBody,
    TaskSubmission,
    decode,
    decode_any,
    encode,
)
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS, MAX_NESTING

HALF = "\ud800"


def nested(levels: int, value: Any = 1) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("value", "where", "problem"),
    [
        (10**30, "x", "an integer of 100 bits, wanted one of at most 64"),
        ([0, -(2**63) - 1], "x.1", "an integer of 64 bits, wanted one of at most 64"),
        (HALF, "x", "half a surrogate pair at character 0, wanted Unicode text"),
        ({"a": {HALF: 1}}, "x.a.\\ud800", "half a surrogate pair"),
        ({1: 2}, "x.1", "a key that is a int, wanted text"),
        (({"a": [{None: 2}]},), "x.0.a.0.None", "a key that is a NoneType, wanted text"),
        (object(), "x", "a object, wanted text, bytes, a number, a list or a map"),
        ({"a": {1, 2}}, "x.a", "a set, wanted text"),
        (nested(MAX_NESTING), "x.0.0.0", "more than 64 levels"),
        (nested(600), "x.0.0.0", "more than 64 levels"),
        (nested(100_000), "x.0.0.0", "more than 64 levels"),
        (endless(), "x.again.again", "more than 64 levels"),
        ([[]] * MAX_CONTAINERS, "", "more than 262144 lists and maps"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str | int) else type(value).__name__,
)
def test_what_cannot_travel_is_refused_with_its_path(value: Any, where: str, problem: str) -> None:
    with pytest.raises(ContentError) as caught:
        encode(TaskBody(raw_task={"x": value}))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"task.raw_task.{where}" if where else "task")


@pytest.mark.parametrize(
    "value", [2**64 - 1, -(2**63), float("nan"), b"\xff", (1, "é"), nested(MAX_NESTING - 3), {b"a": 1}]
)
def test_what_can_travel_arrives(value: Any) -> None:
    raw = decode(encode(TaskBody(raw_task={"x": value})), TaskBody).raw_task["x"]
    assert repr(raw) == repr(list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("digits", ["9" * 30, "-" + "9" * 20, "1_" * 20 + "1", f" {2**64}", "9" * 30 + ".0"])
@pytest.mark.parametrize("content_type", [None, JSON_CONTENT_TYPE])
def test_text_of_a_number_beyond_64_bits_is_refused(digits: str, content_type: str | None) -> None:
    """An integer field takes digits as text, and what came in has to go on."""
    fields = {"session": "s", "reward": 1.0, "choice": digits}
    body = json.dumps(fields).encode() if content_type else msgpack.packb(fields)
    with pytest.raises(DecodeError, match=r"choice"):
        decode(body, SessionReward, content_type)


def test_long_digits_where_text_is_wanted_are_text() -> None:
    fields = {"task": {"raw_task": {"x": "9" * 30}}}
    assert decode(msgpack.packb(fields), TaskSubmission).task.raw_task == {"x": "9" * 30}


# -- every kind of message

LITERALS = [
    "1" * 30, "-" + "1" * 400, "1" * 5000, "1e999", "-1e999", "NaN", "Infinity", "-Infinity", '"\\ud800"',
    '["\\udfff"]', '{"\\ud800": 1}', '{"a": 1, "a": 2}', "[" * 100_000, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000, "[" * 70 + "]" * 70, '"' + "9" * 30 + '"', '"' + "x" * 100_000 + '"', "\x00", '"\x1b"', "nul",
]  # fmt: skip
"""JSON in place of a field."""
PACKED = [
    *map(msgpack.packb, [2**64 - 1, -(2**63), float("nan"), 1e300, b"\xff", "9" * 30, b"9" * 30, nested(62)]),
    *map(msgpack.packb, [{1: 2}, {None: 1}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), "x" * 100_000]),
    b"\xa3\xed\xa0\x80", b"\xa1\xff", b"\x82\xa1a\x01\xa1a\x02", b"\x91" * 100_000, b"\xc1", b"\xdd\xff\xff\xff\xff",
    b"\xc7\xff\xff", b"\xd6\xff\x00", b"\xc7\x03\xff\x00\x00\x00", b"", b"\xd8" + bytes(17),
]  # fmt: skip
"""MessagePack in place of a field."""


def fields_of(kind: tuple[str, int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the smallest body of a kind with each name of a field."""
    smallest = {**next(iter(CASES[kind].values())), "kind": kind[0], "version_number": kind[1]}
    for name in {*CATALOGUE[kind].model_fields, "kind", "version_number", "unknown"}:
        yield {key: value for key, value in smallest.items() if key != name}, name


def travels_on(body: bytes, content_type: str | None) -> bool:
    """Return whether a body is read; then it can be written, and is read again."""
    try:
        message = decode_any(body, content_type)
    except DecodeError:
        return False
    decode_any(encode(message))
    return True


@pytest.mark.parametrize("kind", CATALOGUE)
def test_hostile_json_in_any_field_of_any_kind_is_refused_or_travels_on(kind: tuple[str, int]) -> None:
    for fields, name in fields_of(kind):
        for literal in LITERALS:
            head = json.dumps(fields)[:-1] + (", " if fields else "")
            travels_on(f'{head}"{name}": {literal}}}'.encode(), JSON_CONTENT_TYPE)
            travels_on(f'{head}"{name}": {{"a": [{literal}]}}}}'.encode(), JSON_CONTENT_TYPE)
    assert travels_on(json.dumps({**fields_and_kind(kind)}).encode(), JSON_CONTENT_TYPE)


@pytest.mark.parametrize("kind", CATALOGUE)
def test_hostile_msgpack_in_any_field_of_any_kind_is_refused_or_travels_on(kind: tuple[str, int]) -> None:
    for fields, name in fields_of(kind):
        head = bytes([0xDE, 0, len(fields) + 1]) + b"".join(
            msgpack.packb(key) + msgpack.packb(value) for key, value in fields.items()
        )
        for packed in PACKED:
            travels_on(head + msgpack.packb(name) + packed, None)
            travels_on(head + msgpack.packb(name) + b"\x81\xa1a\x91" + packed, None)
    assert travels_on(msgpack.packb(fields_and_kind(kind)), None)


def fields_and_kind(kind: tuple[str, int]) -> dict[str, Any]:
    return {**next(iter(CASES[kind].values())), "kind": kind[0], "version_number": kind[1]}


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b"", b"\x00", b"null", b'"x"', b"[]", b"{}{}", b'{"a":1}\x00', *(
        json.dumps({"task": {}, "x": HALF}).encode(encoding) for encoding in ("utf-16", "utf-32")
    )],
)  # fmt: skip
@pytest.mark.parametrize("content_type", [JSON_CONTENT_TYPE, "application/msgpack", "text/plain", HALF, "", None])
def test_bodies_that_are_no_map_are_refused_under_any_content_type(body: bytes, content_type: str | None) -> None:
    for read in (lambda: decode_any(body, content_type), lambda: decode(body, TaskSubmission, content_type)):
        with pytest.raises(DecodeError):
            read()


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=9)
    | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers() | st.none(), inner),
    max_leaves=20,
)


@settings(max_examples=examples(100))
@given(st.dictionaries(st.text(st.characters(), max_size=4), ANY, max_size=4))
def test_what_is_written_is_read(raw_task: dict[str, Any]) -> None:
    """Whatever a task holds, it is refused by the writer, or by no reader."""
    with contextlib.suppress(ContentError):
        decode(encode(TaskBody(raw_task=raw_task)), TaskBody)


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


def test_a_repeated_key_among_many_is_found_at_once() -> None:
    keys = [*range(30_000), 29_999]
    body = b'{"kind": "mark", ' + b", ".join(b'"%d": 0' % key for key in keys) + b"}"
    began = time.process_time()
    with pytest.raises(DecodeError, match="the key '29999' is repeated in one map"):
        decode_any(body, JSON_CONTENT_TYPE)
    assert time.process_time() - began < 2, "the time rose with the square of the number of keys"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_that_are_no_json_are_refused_and_their_text_is_taken(literal: str) -> None:
    body = '{"kind": "metrics", "role": "trainer", "id": "t", "step": 1, "values": {"loss": VALUE}}'
    with pytest.raises(DecodeError, match=f'{literal} is not valid JSON; .* send the text "{literal}" instead'):
        decode_any(body.replace("VALUE", literal).encode(), JSON_CONTENT_TYPE)
    message = decode(body.replace("VALUE", f'"{literal}"').encode(), Metrics, JSON_CONTENT_TYPE)
    assert str(message.values["loss"]) == str(float(literal))


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
