from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest

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
from trinity_mq.config.bus import BrokerConfig

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
