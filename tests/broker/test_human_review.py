"""Human review on a real broker: an operator process asks, a plain AMQP client and the command line answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from tests.broker.test_operator_failures import operators
from tests.waiting import until
from trinity_mq.bus import Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.cli.main import main as command
from trinity_mq.experience import Experience
from trinity_mq.runtime.deliveries import EXPERIENCES
from trinity_mq.testing.tcp_proxy import FaultProxy

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


async def test_verdicts_of_a_plain_client_and_of_the_command_line_count(
    broker_url: str, topology: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    review = {"name": "human_review", "args": {"choose": {"fraction": 1.0}, "seconds": 60, "default": "drop"}}
    chain: dict[str, Any] = {"operators": [review]}
    async with operators(tmp_path, topology, broker_url, "", "operator-0", operator=chain) as stage:
        listed: list[dict[str, Any]] = []

        async def asked() -> bool:
            code = await stage.command("review", "list", "--json")
            out = capsys.readouterr().out
            listed[:] = json.loads(out) if code == 0 else []
            return len(listed) == 2

        await stage.closed(1)
        await until(asked, 60.0)
        first, second = sorted(listed, key=lambda one: one["uid"])
        assert first["ticket"] == "t1"
        assert first["reasons"] == ["one of 1 of all runs"]
        assert 0 < first["seconds_left"] <= 60

        async with await aio_pika.connect(broker_url) as connection:
            channel = await connection.channel()
            exchange = await channel.get_exchange(f"tmq.{topology.run}.review")
            body = json.dumps({"request": first["request"], "verdict": "reward", "reward": 0.25, "by": "a program"})
            message = aio_pika.Message(body.encode(), content_type="application/json")
            await exchange.publish(message, routing_key="verdict")
        code = await command_on(stage, "review", "keep", second["request"][:12], "--by", "ann", "--json")
        given = json.loads(capsys.readouterr().out)
        assert (code, given["counts"], given["closed"]["by"]) == (0, True, "ann")
        (decided,) = await stage.decided(1)
        assert (decided.state, decided.experiences) == ("ready", 2)
        assert {name: value for name, value in decided.metrics.items() if name.startswith("review/")} == {
            "review/asked": 2.0,
            "review/not_asked": 0.0,
            "review/kept": 1.0,
            "review/dropped": 0.0,
            "review/rewarded": 1.0,
            "review/timed_out": 0.0,
        }
        assert await rewards(stage.bus, topology) == {0: 0.25, 1: 1.0}, "what a trainer reads"

        assert await command_on(stage, "review", "drop", second["request"], "--by", "bob") == 1
        assert "does not count: it is closed: keep by ann" in capsys.readouterr().err
        assert await command_on(stage, "review", "show", first["request"]) == 0
        assert "decided: reward 0.25 by a program" in capsys.readouterr().out
        assert await stage.command("review", "list") == 0
        assert capsys.readouterr().out == "no run waits for a verdict\n"
    assert await stage.command("clean") == 0
    async with await aio_pika.connect(broker_url) as connection:
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await (await connection.channel()).get_queue(topology.review.name)


@pytest.mark.extended
async def test_a_batch_that_waits_for_a_verdict_outlives_its_broker_being_away(
    broker_url: str, topology: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    review = {"name": "human_review", "args": {"choose": {"fraction": 1.0}, "seconds": 60, "default": "drop"}}
    async with (
        FaultProxy(broker_url) as proxy,
        operators(tmp_path, topology, proxy.url, "", "operator-0", operator={"operators": [review]}) as stage,
    ):
        listed: list[dict[str, Any]] = []

        async def listing() -> int:
            code = await asyncio.to_thread(command, ["review", "list", topology.run, "--json", "--broker", broker_url])
            out = capsys.readouterr().out
            listed[:] = json.loads(out) if code == 0 else []
            return len(listed)

        async def asked() -> bool:
            return await listing() == 2

        await stage.closed(1)
        await until(asked, 60.0)
        proxy.refuse()
        # a verdict that comes while the operator is away is on the stream when it comes back
        line = ["review", "keep", topology.run, listed[0]["request"], "--by", "ann", "--broker", broker_url]
        assert await asyncio.to_thread(command, line) == 0
        assert "noted; it counts once an operator has read it" in capsys.readouterr().out
        proxy.accept()
        line[3] = listed[1]["request"]
        assert await asyncio.to_thread(command, line) == 0
        assert "keep by ann counts" in capsys.readouterr().out
        (decided,) = await stage.decided(1)
        assert (decided.state, decided.experiences) == ("ready", 2)
        assert (decided.metrics["review/kept"], decided.metrics["review/timed_out"]) == (2.0, 0.0)


async def test_a_run_that_asks_nobody_says_so(
    broker_url: str, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(command, ["review", "list", topology.run, "--broker", broker_url]) == 2
    assert "none of its operators requests reviews; the operator `human_review` does" in capsys.readouterr().err


async def command_on(stage: Any, *words: str) -> int:
    """Run ``trinity-mq review ACTION RUN ...``."""
    line = [*words[:2], stage.topology.run, *words[2:], "--broker", stage.url]
    return await asyncio.to_thread(command, line)


async def rewards(bus: Any, topology: Topology) -> dict[int, float | None]:
    found: dict[int, float | None] = {}
    async with await bus.consume(topology.ready, offset=0) as feed:
        while (delivery := await next_or_quiet(bus, feed, 2.0)) is not None:
            if delivery.content_type == EXPERIENCES:
                found |= {exp.eid.run: exp.reward for exp in Experience.deserialize_many(delivery.body)}
    return found
