from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trinity_mq.bus import BusUnavailable, Consumer, Delivery, Envelope, Incoming, StaleDelivery, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.properties import publishable
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import BatchReady, ControlEvent, DecodeError, Heartbeat, TaskResult, decode, decode_any
from trinity_mq.runtime.deliveries import (
    MAX_DEATHS,
    CrashLog,
    DeliveryHistory,
    acknowledge,
    dead_letter,
    decode_or_dead_letter,
    envelope,
    handle_or_set_aside,
    message_in_hand,
    requeue,
    return_delivery,
)
from trinity_mq.runtime.errors import CrashingMessageError, FatalError, RestartRequested, is_content_error
from trinity_mq.runtime.plugins import UnknownNameError

TOPOLOGY = Topology("w")
CLOSED = TOPOLOGY.closed


class ReadingBus(MemoryBus):
    """Reads the manifests of closed batches."""

    feed: Consumer

    async def received(self) -> Delivery:
        """Return the next delivery of the queue."""
        return await anext(self.feed)

    async def dead(self) -> list[Delivery]:
        """Return what is in the queue of dead letters."""
        feed, letters = await self.consume(self._topology.dead), []
        while (delivery := feed.get_nowait()) is not None:
            letters.append(delivery)
        return letters


@pytest.fixture
async def bus() -> AsyncIterator[ReadingBus]:
    with capture_logs():
        made = ReadingBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
        await made.connect()
        await made.declare(*TOPOLOGY.durable)
        made.feed = await made.consume(CLOSED)
        yield made
        await made.close()


async def received(bus: ReadingBus, body: bytes = b"?", **how: Any) -> Delivery:
    await bus.publish(TOPOLOGY.exchange("batches"), "closed", Envelope(body=body, **{"kind": "odd", **how}))
    return await bus.received()


def test_headers_repeat_what_a_router_needs() -> None:
    result = TaskResult(batch="3/held", ticket="t", task_id=0, attempt="a", outcome="finished")
    mail = envelope(result, message_id="m", correlation_id="c", reply_to="r", headers={"batch": "other"})
    assert mail.headers == {"kind": "task_result", "version": 1, "batch": "other", "ticket": "t", "attempt": "a"}
    assert (mail.message_id, mail.kind, mail.correlation_id, mail.reply_to) == ("m", "task_result", "c", "r")
    assert decode_any(mail.body) == result
    control = ControlEvent(verb="drain", target="all")
    assert envelope(control).message_id != envelope(control).message_id
    assert decode(envelope(control).body, ControlEvent) == control


async def test_a_parked_body_keeps_what_it_came_with(bus: ReadingBus) -> None:
    how = {"message_id": "m7", "content_type": "text/plain", "correlation_id": "c", "reply_to": "r"}
    delivery = await received(bus, b"body", headers={"ticket": "t", "x-death": "no"}, **how)
    await dead_letter(bus, TOPOLOGY, delivery, "why " * 1000, "me")
    (copy,) = await bus.dead()
    assert (copy.body, copy.routing_key, copy.kind, copy.content_type) == (b"body", "closed", "odd", "text/plain")
    assert (copy.correlation_id, copy.reply_to, copy.message_id) == ("c", "r", f"dead-{CLOSED.name}-m7")
    assert copy.headers["ticket"] == "t"
    assert "x-death" not in copy.headers
    assert (copy.headers["dead-queue"], copy.headers["dead-by"], copy.headers["dead-deliveries"]) == (
        CLOSED.name,
        "me",
        0,
    )
    assert len(str(copy.headers["dead-reason"])) == 1000
    await delivery.ack()  # parking does not answer for the original


@pytest.mark.parametrize("quiet", [False, True], ids=["", "of many who hear a broadcast none parks it"])
async def test_what_does_not_decode_is_parked_and_acknowledged(bus: ReadingBus, quiet: bool) -> None:
    ids = []
    for body in (b"\xc1one", b"\xc1two", b"\xc1one"):
        delivery = await received(bus, body)
        delivery.message_id = None
        assert await decode_or_dead_letter(bus, TOPOLOGY, delivery, "me", quiet=quiet) is None
        with pytest.raises(StaleDelivery):
            await delivery.ack()
    copies = await bus.dead()
    assert all(str(copy.headers["dead-reason"]).startswith("does not decode: ") for copy in copies)
    ids = [copy.message_id for copy in copies]
    if quiet:
        assert ids == []
    else:
        assert ids[0] == ids[2] != ids[1], "bodies without an id are told apart, and repeats are not"


async def test_only_what_is_expected_may_leave_its_kind_out(bus: ReadingBus) -> None:
    control = b'{"verb": "drain", "target": "all"}'
    delivery = await received(bus, control, content_type="application/json")
    found = await decode_or_dead_letter(bus, TOPOLOGY, delivery, "me", expect=ControlEvent)
    assert found == ControlEvent(verb="drain", target="all")
    assert await acknowledge(delivery) is True
    delivery = await received(bus, control, content_type="application/json")
    assert await decode_or_dead_letter(bus, TOPOLOGY, delivery, "me") is None
    delivery = await received(bus, envelope(found).body)
    assert await decode_or_dead_letter(bus, TOPOLOGY, delivery, "me", expect=Heartbeat) is None


async def test_answers_to_void_deliveries_are_harmless(bus: ReadingBus) -> None:
    for number, answer in enumerate((acknowledge, requeue)):
        delivery = await received(bus) if number == 0 else await bus.received()
        bus.disconnect("gone")
        bus.reconnect()
        assert not await answer(delivery)
        assert delivery.deliveries_before == number


async def test_the_history_of_a_delivery_is_what_the_broker_took_back_and_what_was_given_back(bus: ReadingBus) -> None:
    await requeue(await received(bus, b"again", message_id="m"))
    again = await bus.received()
    assert (again.body, again.deliveries_before, DeliveryHistory.of(again)) == (
        b"again",
        1,
        DeliveryHistory(returned=1),
    )
    await return_delivery(bus, again)
    again = await bus.received()
    assert (again.deliveries_before, DeliveryHistory.of(again)) == (0, DeliveryHistory(given_back=1, returned=1))
    odd = {"given-back": "many", "failed-tries": -3, "returned": 1.5, "failures": 7}
    assert DeliveryHistory.of(await received(bus, headers=odd)) == DeliveryHistory(), "headers from outside"


async def test_given_back_it_comes_again_under_its_id_and_says_so(bus: ReadingBus) -> None:
    how = {"message_id": "m7", "content_type": "text/plain", "correlation_id": "c", "reply_to": "r"}
    delivery = await received(bus, b"again", headers={"ticket": "t", "x-death": "no"}, **how)
    await return_delivery(bus, delivery)
    again = await bus.received()
    assert (again.body, again.message_id, again.kind, again.routing_key) == (b"again", "m7", "odd", "closed")
    assert (again.content_type, again.correlation_id, again.reply_to) == ("text/plain", "c", "r")
    assert again.headers == {"ticket": "t", "kind": "odd", "given-back": 1}
    assert await acknowledge(delivery) is False
    await return_delivery(bus, again, "out of\n memory")
    past = DeliveryHistory.of(await bus.received())
    assert past == DeliveryHistory(given_back=1, failed=1, failures=("delivery 2: out of memory",))
    assert (past.count, past.suspect) == (2, 1)


@pytest.mark.parametrize("exchange", ["", "somebody-elses", TOPOLOGY.exchange("tasks")])
async def test_what_cannot_be_published_again_is_requeued(bus: ReadingBus, exchange: str) -> None:
    delivery = await received(bus, message_id="m")
    delivery.exchange, delivery.routing_key = exchange, "nowhere"
    await return_delivery(bus, delivery)
    async with asyncio.timeout(5):
        again = await bus.received()
    assert (again.deliveries_before, "given-back" in again.headers) == (1, False)


def test_only_the_latest_failures_travel_and_are_kept_short() -> None:
    past = DeliveryHistory()
    for number in range(9):
        past = past.then(f"{number} " + "x" * 1000)
    assert [line.split()[2] for line in past.failures] == ["4", "5", "6", "7", "8"]
    assert len(str(past.headers["failures"])) < 5 * 270


def test_crash_notes_know_what_was_at_work_when_a_process_ended(tmp_path: Path) -> None:
    path = tmp_path / "runner-0.at-work.json"
    notes = CrashLog(path)
    with notes.at_work("a"):
        with notes.at_work("b"):
            pass
        died_here = CrashLog(path)  # what a process that is started now finds
    assert (died_here.crashes("a"), died_here.crashes("b")) == (1, 0)
    with died_here.at_work("a"):
        again = CrashLog(path)
    assert (again.crashes("a"), again.crashes("c")) == (2, 0)
    again.forget("a")
    assert not path.exists()


@pytest.mark.parametrize("content", ["[", "[1]", '{"a": "x"}', '{"a": null}', "7", None])
def test_crash_notes_that_cannot_be_read_or_written_are_no_evidence_and_stop_no_work(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / ("missing/notes" if content is None else "notes")
    if content is not None:
        path.write_text(content)
    with capture_logs() as logs:
        notes = CrashLog(path)
        assert notes.crashes("a") == 0
        with notes.at_work("a"):
            pass
    event = "crash_notes_not_written" if content is None else "crash_notes_unreadable"
    assert {each["event"] for each in logs} == {event}


async def test_a_dead_letter_leaves_out_the_headers_that_cannot_travel_and_says_so(bus: ReadingBus) -> None:
    delivery = await received(bus)
    delivery.headers = {"kind": "k" * 60_000, "good": 1e308, "big": 2**64, "list": [1], "given-back": 2**63 - 1}
    delivery.message_id = "a" * 255
    for _ in range(2):
        await dead_letter(bus, TOPOLOGY, delivery, "why \ud800", "me")
    copy, repeat = await bus.dead()
    assert copy.headers["dead-reason"] == "why \\ud800; headers left out: kind, big, list"
    assert (copy.headers["good"], copy.headers["given-back"]) == (1e308, 2**31 - 1)
    assert not {"big", "list"} & set(copy.headers)
    assert copy.kind == "unknown"
    assert copy.message_id == repeat.message_id
    assert len(copy.message_id or "") <= 255


@pytest.mark.parametrize("batch", [-(2**63), 2**64 - 1, "1/" + "x" * 100_000])
def test_a_batch_that_no_header_can_hold_is_in_the_body_alone(batch: int | str) -> None:
    ready = BatchReady(batch=batch, ticket="t", op="o", state="failed")
    sent = publishable(envelope(ready))
    assert sent.headers == {"kind": "batch_ready", "version": 1, "ticket": "t"}
    assert decode(sent.body, BatchReady).batch == batch


# -- messages that cannot be handled, or that end the process that handles them


DIES = """
import os, signal, sys
from pathlib import Path
from trinity_mq.bus import Incoming
from trinity_mq.runtime.deliveries import CrashLog

queue, offset, name = sys.argv[2:5]
message = Incoming(body=b"x", exchange="", routing_key="", queue=queue, message_id=name or None)
message.offset = int(offset) if offset else None
with CrashLog(Path(sys.argv[1])).in_hand(message) as deaths:
    print(deaths, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def dead_reasons(bus: ReadingBus) -> list[str]:
    letters = await bus.dead()
    assert {letter.body for letter in letters} <= {b"body"}
    return [str(letter.headers["dead-reason"]) for letter in letters]


OF_THE_CONTENT = [
    *(kind("x") for kind in (ValueError, KeyError, TypeError, OverflowError, RecursionError, DecodeError)),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "s"),
    ExceptionGroup("g", [ValueError(), KeyError()]),
]
NOT_OF_THE_CONTENT = [
    *(kind("x") for kind in (OSError, TimeoutError, MemoryError, RuntimeError, BusUnavailable, FatalError)),
    *(kind("x") for kind in (UnknownNameError, RestartRequested, asyncio.CancelledError)),
    ExceptionGroup("g", [ValueError(), OSError()]),
]


@pytest.mark.parametrize("error", [*OF_THE_CONTENT, *NOT_OF_THE_CONTENT], ids=repr)
def test_which_errors_are_of_the_content(error: BaseException) -> None:
    assert is_content_error(error) is (error in OF_THE_CONTENT)


async def fails_with(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("quiet", [False, True], ids=["", "of a broadcast nobody makes a dead letter"])
async def test_a_message_that_cannot_be_handled_is_set_aside_and_decided(bus: ReadingBus, quiet: bool) -> None:
    delivery, decided = await received(bus, b"body", message_id="m1"), list[str]()

    async def decide(reason: str) -> None:
        decided.append(reason)

    error = KeyError("no such field")
    await handle_or_set_aside(bus, TOPOLOGY, delivery, "me", lambda: fails_with(error), decide=decide, quiet=quiet)
    assert decided == ["cannot be handled: KeyError: 'no such field'"]
    assert await dead_reasons(bus) == ([] if quiet else decided)
    with pytest.raises(StaleDelivery):  # it was acknowledged
        await delivery.ack()
    unreadable = await received(bus, b"body", message_id="m2")
    unreadable.unreadable = "its message id is not UTF-8"
    assert await decode_or_dead_letter(bus, TOPOLOGY, unreadable, "me", quiet=quiet) is None


@pytest.mark.parametrize("error", [OSError("disk"), BusUnavailable("away"), MemoryError(), FatalError("f")], ids=repr)
async def test_good_work_is_not_set_aside_because_of_a_disk_or_broker(
    bus: ReadingBus, error: Exception, tmp_path: Path
) -> None:
    delivery = await received(bus, b"body", message_id="m1")
    for _ in range(MAX_DEATHS + 1):  # and an error is no death
        bus.notes = CrashLog(tmp_path / "notes")
        with pytest.raises(type(error)):
            await handle_or_set_aside(bus, TOPOLOGY, delivery, "me", lambda: fails_with(error))
    assert await dead_reasons(bus) == []
    await delivery.ack()  # it is unanswered


def kill_with(path: Path, queue: str, *, offset: str = "", name: str = "") -> int:
    """Have a process die with a message in hand; return the deaths that it knew of."""
    ended = subprocess.run(
        [sys.executable, "-c", DIES, str(path), queue, offset, name],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return int(ended.stdout.split()[-1])


async def test_a_message_in_hand_at_three_deaths_is_set_aside_raw(bus: ReadingBus, tmp_path: Path) -> None:
    path = tmp_path / "explorer.in-hand.json"
    deaths = [kill_with(path, CLOSED.name, name="deadly") for _ in range(MAX_DEATHS)]
    assert deaths == [0, 1, 2]
    bus.notes, handled = CrashLog(path), list[str]()

    async def handle(delivery: Delivery) -> None:
        handled.append(str(delivery.message_id))
        await acknowledge(delivery)

    for name in ("deadly", "healthy"):
        delivery = await received(bus, b"body", message_id=name)
        await handle_or_set_aside(bus, TOPOLOGY, delivery, "me", lambda: handle(delivery))  # noqa: B023
    assert handled == ["healthy"]
    assert kill_with(path, CLOSED.name, name="healthy") == 0, "what was handled is forgotten"
    assert await dead_reasons(bus) == ["the process died 3 times while it handled this message"]


def test_a_place_stays_set_aside_when_the_stream_is_read_again(tmp_path: Path, bus: ReadingBus) -> None:
    path, queue = tmp_path / "gateway.in-hand.json", TOPOLOGY.sessions.name
    for _ in range(MAX_DEATHS):
        kill_with(path, queue, offset="17")
    for _ in range(2):  # lives of the gateway
        bus.notes = CrashLog(path)
        for offset in (16, 17, 18):
            message = Incoming(body=b"", exchange="", routing_key="", queue=queue, offset=offset)
            if offset == 17:
                with pytest.raises(CrashingMessageError), message_in_hand(bus, message):
                    raise AssertionError("it was handled")
            else:
                with message_in_hand(bus, message):
                    pass
