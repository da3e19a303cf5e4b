"""Messages that cannot be handled because of their content, and messages that end the process that handles them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.runtime.reading_bus import ReadingBus, reading
from trinity_mq.bus import BusUnavailable, Delivery, Envelope, Incoming, StaleDelivery, Topology
from trinity_mq.messages import DecodeError
from trinity_mq.runtime.deliveries import (
    MAX_DEATHS,
    CrashLog,
    acknowledge,
    decode_or_dead_letter,
    handle_or_set_aside,
    message_in_hand,
)
from trinity_mq.runtime.errors import CrashingMessageError, FatalError, RestartRequested, is_content_error
from trinity_mq.runtime.plugins import UnknownNameError

TOPOLOGY = Topology("w")
WORK = TOPOLOGY.submitted

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


@pytest.fixture
async def bus() -> AsyncIterator[ReadingBus]:
    async with reading(TOPOLOGY, WORK) as made:
        yield made


async def received(bus: ReadingBus, name: str) -> Delivery:
    await bus.publish(TOPOLOGY.exchange("tasks"), "submit", Envelope(body=b"body", kind="odd", message_id=name))
    return await bus.received()


async def dead_reasons(bus: ReadingBus) -> list[str]:
    letters = await bus.dead()
    assert {letter.body for letter in letters} <= {b"body"}
    return [str(letter.headers["dead-reason"]) for letter in letters]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("v"), True),
        (KeyError("k"), True),
        (TypeError("t"), True),
        (OverflowError("o"), True),
        (RecursionError("r"), True),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "s"), True),
        (DecodeError("d"), True),
        (ExceptionGroup("g", [ValueError(), KeyError()]), True),
        (ExceptionGroup("g", [ValueError(), OSError()]), False),
        (OSError("disk"), False),
        (TimeoutError(), False),
        (MemoryError(), False),
        (RuntimeError("torch"), False),
        (BusUnavailable("away"), False),
        (FatalError("f"), False),
        (UnknownNameError("a name of the configuration"), False),
        (RestartRequested("r"), False),
        (asyncio.CancelledError(), False),
    ],
    ids=repr,
)
def test_which_errors_are_of_the_content(error: BaseException, wanted: bool) -> None:
    assert is_content_error(error) is wanted


async def fails_with(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("quiet", [False, True], ids=["", "of a broadcast nobody makes a dead letter"])
async def test_a_message_that_cannot_be_handled_is_set_aside_and_decided(bus: ReadingBus, quiet: bool) -> None:
    delivery, decided = await received(bus, "m1"), list[str]()

    async def decide(reason: str) -> None:
        decided.append(reason)

    error = KeyError("no such field")
    await handle_or_set_aside(bus, TOPOLOGY, delivery, "me", lambda: fails_with(error), decide=decide, quiet=quiet)
    assert decided == ["cannot be handled: KeyError: 'no such field'"]
    assert await dead_reasons(bus) == ([] if quiet else decided)
    with pytest.raises(StaleDelivery):  # it was acknowledged
        await delivery.ack()
    unreadable = await received(bus, "m2")
    unreadable.unreadable = "its message id is not UTF-8"
    assert await decode_or_dead_letter(bus, TOPOLOGY, unreadable, "me", quiet=quiet) is None


@pytest.mark.parametrize("error", [OSError("disk"), BusUnavailable("away"), MemoryError(), FatalError("f")], ids=repr)
async def test_good_work_is_not_set_aside_because_of_a_disk_or_broker(
    bus: ReadingBus, error: Exception, tmp_path: Path
) -> None:
    delivery = await received(bus, "m1")
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
    deaths = [kill_with(path, WORK.name, name="deadly") for _ in range(MAX_DEATHS)]
    assert deaths == [0, 1, 2]
    bus.notes, handled = CrashLog(path), list[str]()

    async def handle(delivery: Delivery) -> None:
        handled.append(str(delivery.message_id))
        await acknowledge(delivery)

    for name in ("deadly", "healthy"):
        delivery = await received(bus, name)
        await handle_or_set_aside(bus, TOPOLOGY, delivery, "me", lambda: handle(delivery))  # noqa: B023
    assert handled == ["healthy"]
    assert kill_with(path, WORK.name, name="healthy") == 0, "what was handled is forgotten"
    assert await dead_reasons(bus) == ["the process died 3 times while it handled this message"]


def test_a_place_on_a_stream_stays_set_aside_when_the_stream_is_read_again(tmp_path: Path, bus: ReadingBus) -> None:
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
