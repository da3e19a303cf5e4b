from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from pamqp import header

from tests.raw_amqp import FLAGS, long, nested, properties, short
from trinity_mq.bus.rabbit.content_headers import Properties, ReadHeader, read_header


def read(fields: bytes, size: int = 7) -> ReadHeader:
    return read_header(struct.pack(">HHQ", 60, 0, size) + fields)


def test_what_the_client_writes_is_read_the_same() -> None:
    headers: dict[str, Any] = {"s": "é", "t": True, "b": -1, "u": 40000, "i": 2**31, "l": -(2**63), "f": 0.1, "e": ""}
    ours = Properties(headers=headers, message_id="m", content_type="c", correlation_id="x", reply_to="r", app_id="a")
    found = read_header(header.ContentHeader(body_size=9, properties=ours).marshal())
    assert found.unreadable is None
    assert found.body_size == 9
    assert found.properties.headers == headers
    assert (found.properties.message_id, found.properties.content_type) == ("m", "c")
    assert (found.properties.correlation_id, found.properties.reply_to) == ("x", "r")


def test_floats_are_exact_also_for_the_client_that_release_0_1_0_reads_with() -> None:
    ours = Properties(headers={"at": 1795872672.25, "big": 1e308}, delivery_mode=2)
    theirs = header.ContentHeader()
    theirs.unmarshal(header.ContentHeader(properties=ours).marshal())
    assert theirs.properties.headers == {"at": 1795872672.25, "big": 1e308}


@pytest.mark.parametrize("name", ["message_id", "correlation_id", "reply_to", "content_type"])
def test_a_property_that_is_no_utf8_is_marked_and_the_others_are_read(name: str) -> None:
    others = {"message_id": short(b"good"), "type": short(b"\xff"), "timestamp": struct.pack(">Q", 2**62)}
    headers = long(short(b"n") + b"I" + struct.pack(">i", 7))
    found = read(properties(headers=headers, **{**others, name: short(b"\xff\xfe")}))
    assert found.unreadable == f"its property {name} is not UTF-8: b'\\xff\\xfe'"
    assert getattr(found.properties, name) == "\\xff\\xfe"
    assert found.properties.headers == {"n": 7}


def test_properties_that_nobody_uses_may_be_anything() -> None:
    bad = short(b"\xff")
    found = read(
        properties(
            timestamp=struct.pack(">Q", 2**64 - 1), message_id=short(b"m"), app_id=bad, user_id=bad, expiration=bad,
            delivery_mode=b"\x09", cluster_id=bad,
        )
    )  # fmt: skip
    assert (found.unreadable, found.properties.message_id) == (None, "m")


def test_nested_and_unknown_values_are_left_out_of_the_headers() -> None:
    entries = [
        nested(3000), short(b"time") + b"T" + b"\xff" * 8, short(b"list") + b"A" + long(b"V" * 60000),
        short(b"bytes") + b"x" + long(b"z"), short(b"decimal") + b"D" + bytes(5), short(b"text") + b"S" + long(b"\xff"),
        short(b"\xff") + b"t\x01", short(b"void") + b"V", short(b"n") + b"l" + struct.pack(">q", 2**63 - 1),
    ]  # fmt: skip
    found = read(properties(headers=long(b"".join(entries))))
    assert found.unreadable is None
    assert found.properties.headers == {
        **dict.fromkeys(("a", "time", "list", "bytes", "decimal", "text", "void")), "\\xff": True, "n": 2**63 - 1
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"\x80",
        struct.pack(">H", FLAGS["message_id"]),
        properties(message_id=b"\x09m"),
        properties(headers=b"\0\0"),
        properties(headers=struct.pack(">I", 2**31) + b"\x01a"),
        properties(headers=long(short(b"a") + b"S" + struct.pack(">I", 99))),
        properties(headers=long(short(b"a") + b"l")),
        properties(headers=long(short(b"a") + b"?")),
        properties(headers=long(short(b"a"))),
        b"\x00\x01\x00\x00",
    ],
)
def test_properties_that_are_no_amqp_are_marked(fields: bytes) -> None:
    assert read(fields).unreadable
    assert read(fields).body_size == 7


def test_no_bytes_raise() -> None:
    chance = random.Random(7)
    real = properties(headers=long(nested(3) + short(b"n") + b"I" + bytes(4)), message_id=short(b"m"))
    for _ in range(3000):
        data = bytearray(real)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        read(bytes(data[: chance.randrange(len(data) + 1)]))
