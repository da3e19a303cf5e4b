"""``trinity-mq dead``: how letters are listed, which go back to operators or trainer, and what is said of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from trinity_mq.bus import Bus, Envelope, Incoming, Topology, create_bus
from trinity_mq.cli.dead import paragraph
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import BatchClosed, BatchReady, decode
from trinity_mq.operations.dead_letters import COLUMNS, row
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope


def test_a_row_says_where_from_and_why() -> None:
    headers = {"kind": "task_slice", "dead-queue": "tmq.r.tasks.train", "dead-reason": "does not decode", "batch": 3}
    letter = Incoming(body=b"12345", exchange="e", routing_key="k", queue="dead", message_id="m", headers=headers)
    assert row(letter) == ("tmq.r.tasks.train", "task_slice", "does not decode", "-", "3", "5", "m")
    letter.headers = {**headers, "operator": "0_Judge"}
    assert row(letter)[3] == "0_Judge"
    letter.headers = {"x-first-death-queue": "q", "x-first-death-reason": "rejected"}
    assert row(letter) == ("q", "-", "rejected", "-", "-", "5", "m"), "the broker itself dead-lettered it"


def test_a_letter_is_readable_on_a_terminal_of_80_columns() -> None:
    reason = "operator 'judge' failed 3 times: " + "KeyError: 'score' in my_operators.py, line 17; " * 4
    cells = ("tmq.my-first-run.closed", "batch_closed", reason, "0_Judge", "12", "812", f"closed-{'0' * 32}-{'1' * 32}")
    lines = paragraph(3, cells, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "3. batch_closed from tmq.my-first-run.closed, batch 12, operator 0_Judge, 812"
    assert lines[1] == "   bytes"
    assert " ".join(" ".join(lines).split()).count("KeyError: 'score' in my_operators.py, line 17;") == 4
    assert lines[-1] == f"   id closed-{'0' * 32}-{'1' * 32}"


def test_a_list_of_no_letters_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dead", "list", "r", "--limit", "-1"]) == 2
    assert "--limit is -1, wanted at least 1" in capsys.readouterr().err


@pytest.mark.broker
def test_listing_leaves_them_where_they_are(
    broker_url: str, unique_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def publish(bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        for n in range(3):
            headers = {"kind": "odd", "dead-reason": "because\nof it"}
            letter = Envelope(body=b"x", kind="odd", message_id=f"m{n}", headers=headers)
            await bus.publish(topology.exchange("dead"), "odd", letter)

    words = ["dead", "list", unique_run, "--broker", broker_url]
    assert main(words) == 0
    assert "has no dead letters" in capsys.readouterr().out
    do(broker_url, unique_run, publish)
    for _ in range(2):
        assert main(words) == 0
        out = capsys.readouterr().out
        head, *rows = [line.split("\t") for line in out.splitlines()]
        assert head == list(COLUMNS)
        assert [(cells[2], cells[6]) for cells in rows] == [("because of it", f"m{n}") for n in range(3)]
    assert main([*words, "--limit", "2"]) == 0
    hint = f"next: trinity-mq dead replay {unique_run} --broker URL, after the cause is removed"
    assert capsys.readouterr().err.splitlines() == ["2 of 3 shown (--limit)", hint]


# -- replay


def do(url: str, run: str, what: Callable[[Bus, Topology], Awaitable[None]]) -> None:
    async def connected() -> None:
        topology = Topology(run)
        bus = create_bus(BrokerConfig(url=url), topology, "test")
        await bus.connect()
        await what(bus, topology)
        await bus.close()

    asyncio.run(connected())


async def left(bus: Bus, topology: Topology, count: int) -> None:
    """So many letters are in the queue: those that were given back are there a moment later, when that is on disk."""
    async with asyncio.timeout(10):
        while await bus.depth(topology.dead.name) != count:  # noqa: ASYNC110  # the broker does not notify
            await asyncio.sleep(0.05)


async def bury(bus: Bus, topology: Topology, *batches: tuple[int, str]) -> None:
    for batch, ticket in batches:
        found = envelope(BatchClosed(batch=batch, ticket=ticket), headers={"operator": "0_Judge", "dead-reason": "no"})
        await bus.publish(topology.exchange("dead"), "closed", found)


@pytest.mark.broker
def test_chosen_batches_go_back_and_the_rest_stays(
    broker_url: str, unique_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dead", "replay", unique_run, "--broker", broker_url]
    assert main(words) == 0
    assert capsys.readouterr().out == f"run {unique_run!r} has no dead batch to run again\n"

    async def before(bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead, topology.closed, *(topology.batch_queue(n, f"t{n}") for n in (1, 2)))
        odd = Envelope(body=b"x", kind="task_slice", headers={"kind": "task_slice"})
        await bus.publish(topology.exchange("dead"), "odd", odd)
        broken = Envelope(body=b"x", kind="batch_closed", message_id="b", headers={"kind": "batch_closed", "batch": 9})
        await bus.publish(topology.exchange("dead"), "closed", broken)
        await bury(bus, topology, (1, "t1"), (2, "t2"), (1, "t1"), (3, "t3"))

    do(broker_url, unique_run, before)
    assert main([*words, "--batch", "1"]) == 0
    said = capsys.readouterr().out
    assert "batch 1 was returned to the operators (ticket t1)" in said
    assert "batch 2" not in said
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "batch 2 was returned to the operators" in said
    assert "batch 3: its experiences are gone" in said
    assert "letter b: does not decode" in said
    assert main([*words, "--batch", "2"]) == 0
    assert "no dead batch to run again; 3 other letters stay" in capsys.readouterr().out

    async def after(bus: Bus, topology: Topology) -> None:
        async with await bus.consume(topology.closed, prefetch=10) as feed:
            async with asyncio.timeout(10):
                letters = [await anext(feed) for _ in range(2)]
            assert [decode(letter.body, BatchClosed).ticket for letter in letters] == ["t1", "t2"]
            assert not any(name.startswith("dead-") or name == "operator" for one in letters for name in one.headers)
            assert feed.get_nowait() is None
            for letter in letters:
                await letter.ack()
        await left(bus, topology, 3)

    do(broker_url, unique_run, after)


@pytest.mark.broker
def test_without_operators_queue_the_letter_stays(
    broker_url: str, unique_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def before(bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead, topology.batch_queue(1, "t1"))
        await bury(bus, topology, (1, "t1"))

    do(broker_url, unique_run, before)
    assert main(["dead", "replay", unique_run, "--broker", broker_url]) == 2
    assert "does not exist: start the run" in capsys.readouterr().err
    do(broker_url, unique_run, lambda bus, topology: left(bus, topology, 1))


@pytest.mark.broker
def test_a_batch_that_trainers_did_not_survive_goes_back_to_the_ready_stream(
    broker_url: str, unique_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dead", "replay", unique_run, "--broker", broker_url]

    async def before(bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead, topology.ready)
        for n in range(2):
            headers: dict[str, str | int | float | bool] = {"ticket": "t1", "op": "o", "n": n, "run_id": "r"}
            chunk = Envelope(body=b"TMQX%d" % n, kind="experience_chunk", content_type=EXPERIENCES, headers=headers)
            await bus.publish(topology.exchange("ready"), "1", chunk)
        for batch, ticket, offsets in ((1, "t1", "0,1"), (2, "t2", "0,1"), (3, "t3", "0,700"), (4, "t4", "0")):
            found = BatchReady(batch=batch, ticket=ticket, op="o", chunks=2, experiences=8)
            letter = envelope(found, headers={"dead-reason": "no", "offsets": offsets, "run_id": "r"})
            await bus.publish(topology.exchange("dead"), "ready", letter)

    do(broker_url, unique_run, before)
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "batch 1 was returned to the trainer (ticket t1)" in said
    assert "batch 2: its experiences are gone (ticket t2): the ready stream holds something else at offset 0" in said
    assert "batch 3: its experiences are gone (ticket t3): the ready stream holds something else at offset 0" in said
    assert "does not decode: header offsets is '0', wanted 2 offsets of the ready stream" in said

    async def after(bus: Bus, topology: Topology) -> None:
        await left(bus, topology, 3)
        async with await bus.consume(topology.ready, offset=2) as feed, asyncio.timeout(10):
            *chunks, last = [await anext(feed) for _ in range(3)]
        ready = decode(last.body, BatchReady)
        assert (ready.batch, ready.ticket, ready.chunks, ready.state) == (1, "t1", 2, "ready")
        assert ready.op != "o"
        assert [chunk.body for chunk in chunks] == [b"TMQX0", b"TMQX1"]
        of_chunks = [(one.headers["ticket"], one.headers["op"], one.headers["n"]) for one in chunks]
        assert of_chunks == [("t1", ready.op, 0), ("t1", ready.op, 1)]
        assert {one.run_id for one in (*chunks, last)} == {"r"}
        assert {one.content_type for one in chunks} == {EXPERIENCES}

    do(broker_url, unique_run, after)
