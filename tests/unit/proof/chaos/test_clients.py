"""Clients of a trial: they go on with another gateway, repeat as an SDK does, and note only what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.gateway.serving import Serving, serving, serving_config
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.proof.chaos.sessions.clients import Clients, Traffic, clients_of
from trinity_mq.proof.chaos.sessions.stream import SessionRecord
from trinity_mq.proof.chaos.sessions.verdicts import answers_match_stream
from trinity_mq.proof.invariants import InvariantVerdict

KEY = "a key of sixteen letters"


async def ask(enough: Callable[[Traffic], bool], tmp_path: Path, *, key: str = KEY) -> tuple[Traffic, SessionRecord]:
    """Have clients ask one gateway, and another one that is not there, until they have had enough."""
    keys = tmp_path / "keys"
    keys.write_text(f"{key}\n")
    config = serving_config(gateway={"key_file": str(keys), "num_gateways": 2})
    async with serving(lambda _: "3", config=config, admin=KEY) as gateway:
        clients = Clients(config, seed=1, at_once=16)
        clients.urls = [f"http://127.0.0.1:{free_ports(1)[0]}", gateway.url]
        working = asyncio.create_task(clients.work())
        await until(lambda: enough(clients.traffic), clients, gateway)
        await clients.finish(working, 2.0)
        return clients.traffic, record_of(gateway)


async def until(condition: Callable[[], bool], clients: Clients, gateway: Serving) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # clients tell nobody what they have done
            await asyncio.sleep(0.05)


def record_of(gateway: Serving) -> SessionRecord:
    record = SessionRecord(ledger=gateway.store.ledger)
    for session in record.ledger:
        record.calls[session.id] |= session.calls
    return record


async def test_what_they_note_agrees_with_what_the_gateway_keeps(tmp_path: Path) -> None:
    traffic, record = await ask(lambda seen: len(seen.sessions) > 32, tmp_path)
    verdict: InvariantVerdict = answers_match_stream(traffic, record)
    assert verdict.result == "holds", verdict
    counts = traffic.counts
    assert counts["sessions"] > 32
    assert counts["recorded"] > counts["repeated"] > 0, "the other gateway is not there"
    assert traffic.failures["ClientConnectorError"] > 0
    assert any(told.must_train for told in traffic.sessions)
    assert {told.discarded for told in traffic.sessions} == {True, False}
    assert any(told.group for told in traffic.sessions)
    assert traffic.failures["TimeoutError"] > 0, "some give up at once"
    assert not traffic.settled, "nobody trains here"


async def test_with_another_key_they_are_refused_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.proof.chaos.sessions.clients.UNKNOWN_SECONDS", 0.2)
    traffic, record = await ask(lambda seen: bool(seen.refused), tmp_path, key="another key of sixteen letters")
    assert traffic.refused[0].startswith("POST /sessions: 40")
    assert answers_match_stream(traffic, record).result == "not checked"


def test_who_serves_nobody_has_no_clients() -> None:
    said: list[str] = []
    assert clients_of(serving_config(), 1, 0, said.append) is None
    assert clients_of(serving_config(gateway={"port": 0}), 1, 8, said.append) is None
    assert said == ["gateway.port is 0: the clients cannot know a random port; set a fixed port for traffic"]
    assert clients_of(serving_config(), 1, 8, said.append) is not None
