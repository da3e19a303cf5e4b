"""Properties and headers of messages: ours fit, and an outsider's may be any bytes."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from typing import Any

import pytest
from pamqp import header

from tests.raw_amqp import FLAGS, long, nested, properties, short
from trinity_mq.bus import Topology
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.properties import (
    MAX_HEADERS,
    MAX_OUTSIDE_HEADERS,
    PropertyError,
    clamped,
    omitted_headers_text,
    outside_headers,
    publishable,
    short_property,
)
from trinity_mq.bus.rabbit.content_headers import Properties, ReadHeader, read_header
from trinity_mq.config.bus import BrokerConfig


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


TOPOLOGY = Topology("w")


def test_what_fits_in_a_property_stays_and_the_rest_is_shortened_the_same_each_time() -> None:
    assert short_property("é" * 127) == "é" * 127
    long = "é" * 128
    assert short_property(long) == "é" * 80 + "-" + hashlib.sha256(long.encode()).hexdigest()
    assert short_property(long) != short_property("é" * 129)
    assert short_property("\ud800") == "\\ud800"
    assert len(short_property("x" + "é" * 200).encode()) <= 255


def test_every_property_of_a_message_fits() -> None:
    long = "a" * 300
    mail = publishable(
        Envelope(body=b"", kind="k", message_id=long, content_type=long, correlation_id=long, reply_to=long)
    )
    fits = "a" * 160 + "-" + hashlib.sha256(long.encode()).hexdigest()
    assert (mail.message_id, mail.content_type, mail.correlation_id, mail.reply_to) == (fits, fits, fits, fits)
    plain = Envelope(body=b"", kind="k", message_id="m")
    assert publishable(plain) == plain


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"n" * 129: 1}, "name of 129 bytes, wanted at most 128"),
        ({"n": 2**63}, "an integer of 64 bits"),
        ({"n": -(2**64)}, "an integer of 65 bits"),
        ({"n": "\ud800"}, "text that UTF-8 cannot hold"),
        ({"\ud800": "n"}, "text that UTF-8 cannot hold"),
        ({"n": None}, "is a NoneType, wanted text, a number or a truth value"),
        ({"n": [1]}, "is a list"),
        ({"n": "x" * MAX_HEADERS}, f"wanted at most {MAX_HEADERS}"),
    ],
)
async def test_a_header_of_ours_that_cannot_travel_is_a_property_error(headers: dict[Any, Any], says: str) -> None:
    bus = MemoryBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
    await bus.connect()
    await bus.declare(*TOPOLOGY.durable)
    with pytest.raises(PropertyError, match=says):
        await bus.publish(TOPOLOGY.exchange("tasks"), "submit", Envelope(body=b"", kind="k", headers=headers))
    long = "a" * 300
    assert await bus.publish(TOPOLOGY.exchange("dead"), long, Envelope(body=b"", kind="k", message_id=long))
    delivery = await anext(await bus.consume(TOPOLOGY.dead))
    assert (delivery.message_id, delivery.routing_key) == (short_property(long), short_property(long))
    await bus.close()


def test_of_an_outsiders_headers_those_travel_on_that_can() -> None:
    good = {"a": "x", "b": 2**63 - 1, "c": 1e308, "d": True, "e": math.inf}
    bad = {"n" * 129: 1, "f": 2**63, "g": None, "h": [1], "i": "\ud800", "\ud800": 1, "j": b"x"}
    kept, left_out = outside_headers({**good, "x-death": [1], **bad})
    assert kept == good
    assert left_out == tuple(bad)
    assert publishable(Envelope(body=b"", kind="k", headers=kept)).headers == good
    said = omitted_headers_text(left_out)
    assert said.startswith("; headers left out: nnnn")
    assert said.endswith("and 2 more")
    assert len(said) < 300
    assert omitted_headers_text(()) == ""
    kept, left_out = outside_headers({f"h{n}": "x" * 1000 for n in range(100)})
    assert len(kept) == MAX_OUTSIDE_HEADERS // (1000 + 16 + 3), "they leave room for ours"
    assert len(kept) + len(left_out) == 100


@pytest.mark.parametrize(
    ("value", "count"), [(3, 3), (0, 0), (-1, 0), (True, 0), ("3", 0), (3.5, 0), (None, 0), (2**63 - 1, 2**31 - 1)]
)
def test_counters_from_headers_are_clamped(value: object, count: int) -> None:
    assert clamped(value) == count
