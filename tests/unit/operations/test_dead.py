from __future__ import annotations

import asyncio

import pytest

from trinity_mq.bus import Envelope, Incoming, Topology, create_bus
from trinity_mq.cli.dead import paragraph
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig
from trinity_mq.operations.dead_letters import COLUMNS, row


def test_a_row_says_where_from_and_why() -> None:
    headers = {"kind": "task_slice", "dead-queue": "tmq.r.tasks.train", "dead-reason": "does not decode", "batch": 3}
    letter = Incoming(body=b"12345", exchange="e", routing_key="k", queue="dead", message_id="m", headers=headers)
    assert row(letter) == ("tmq.r.tasks.train", "task_slice", "does not decode", "-", "3", "5", "m")
    letter.headers = {**headers, "operator": "0_Judge"}
    assert row(letter)[3] == "0_Judge"


def test_what_the_broker_itself_dead_lettered() -> None:
    headers = {"x-first-death-queue": "q", "x-first-death-reason": "rejected"}
    letter = Incoming(body=b"", exchange="e", routing_key="k", queue="dead", headers=headers)
    assert row(letter) == ("q", "-", "rejected", "-", "-", "0", "-")


def test_a_letter_is_readable_on_a_terminal_of_80_columns() -> None:
    reason = "operator 'judge' failed 3 times: " + "KeyError: 'score' in my_operators.py, line 17; " * 4
    cells = ("tmq.my-first-run.closed", "batch_closed", reason, "0_Judge", "12", "812", f"closed-{'0' * 32}-{'1' * 32}")
    lines = paragraph(3, cells, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "3. batch_closed from tmq.my-first-run.closed, batch 12, operator 0_Judge, 812"
    assert lines[1] == "   bytes"
    assert " ".join(" ".join(lines).split()).count("KeyError: 'score' in my_operators.py, line 17;") == 4
    assert lines[-1] == f"   id closed-{'0' * 32}-{'1' * 32}"


@pytest.mark.broker
def test_listing_leaves_them_where_they_are(
    broker_url: str, unique_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def publish() -> None:
        topology = Topology(unique_run)
        bus = create_bus(BrokerConfig(url=broker_url), topology, "test")
        await bus.connect()
        await bus.declare(topology.dead)
        for n in range(3):
            letter = Envelope(
                body=b"x", kind="odd", message_id=f"m{n}", headers={"kind": "odd", "dead-reason": "because\nof it"}
            )
            await bus.publish(topology.exchange("dead"), "odd", letter)
        await bus.close()

    words = ["dead", "list", unique_run, "--broker", broker_url]
    assert main(words) == 0
    assert "has no dead letters" in capsys.readouterr().out
    asyncio.run(publish())
    for _ in range(2):
        assert main(words) == 0
        out = capsys.readouterr().out
        head, *rows = [line.split("\t") for line in out.splitlines()]
        assert head == list(COLUMNS)
        assert [(cells[2], cells[6]) for cells in rows] == [
            ("because of it", "m0"),
            ("because of it", "m1"),
            ("because of it", "m2"),
        ]
    assert main([*words, "--limit", "2"]) == 0
    assert capsys.readouterr().err == "2 of 3 shown (--limit)\n"
