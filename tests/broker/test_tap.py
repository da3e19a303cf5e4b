"""``tap`` as a process of its own on a broker that is restarted under it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from tests.broker_fixtures import connected, own_node
from tests.unit.agents.world import experience
from trinity_mq.bus import Bus, Topology
from trinity_mq.experience import EID, Experience
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.messages import BatchClosed, BatchReady, RunEnd
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.transport.experience_parts import chunk_message

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]
GROUP = 4
"""Experiences of a batch."""


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateNode]:
    with own_node() as made:
        yield made


@pytest.fixture
async def bus(node: PrivateNode, topology: Topology) -> AsyncIterator[Bus]:
    async with connected(node.url, topology, connect_timeout=30.0) as made:
        await made.declare(*topology.durable)
        yield made


async def publish(bus: Bus, topology: Topology, batch: int, *, processed: str = "o") -> None:
    """Publish a processed batch in two chunks."""
    closed, exchange = BatchClosed(batch=batch, ticket=f"t{batch}"), topology.exchange("ready")
    made = [experience(eid=EID(batch=batch, task=0, run=run)) for run in range(GROUP)]
    for n, part in enumerate((made[:1], made[1:])):
        assert await bus.publish(
            exchange, str(batch), chunk_message(closed, processed, n, Experience.serialize_many(part))
        )
    ready = BatchReady(batch=batch, ticket=closed.ticket, op=processed, chunks=2, experiences=GROUP)
    assert await bus.publish(exchange, str(batch), envelope(ready))


async def begin(run: str, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "trinity_mq.cli.main", "tap", run, *words]
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, limit=2**22)


async def lines(process: asyncio.subprocess.Process, count: int) -> list[dict[str, Any]]:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return [json.loads(await process.stdout.readline()) for _ in range(count)]


def runs(shown: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["eid"]["batch"], one["eid"]["run"]) for one in shown]


def wanted(*batches: int) -> list[tuple[int, int]]:
    return [(batch, run) for batch in batches for run in range(GROUP)]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Have children heed SIGINT, also where a shell started these tests in its background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
async def test_from_now_some_fields_of_each_second_one_until_ctrl_c(
    node: PrivateNode, bus: Bus, topology: Topology
) -> None:
    await publish(bus, topology, 1)
    words = ["--fields", "eid.batch,eid.run,reward", "--every", "2", "--broker", node.url]
    now = await begin(topology.run, *words)
    later = await begin(topology.run, "--from", "2", *words)
    processes = (now, later)
    try:
        batch = 1
        seen: list[dict[str, Any]] = []
        reading = asyncio.create_task(lines(now, GROUP // 2))
        while not reading.done():  # it says nowhere that it has begun to listen
            batch += 1
            await publish(bus, topology, batch)
            await asyncio.wait([reading], timeout=0.5)
        seen = reading.result()
        assert [set(one) for one in seen] == [{"eid.batch", "eid.run", "reward"}] * 2
        assert [one["eid.run"] for one in seen] == [0, 2]
        assert seen[0]["eid.batch"] > 1
        assert (await lines(later, 1))[0]["eid.batch"] == 2
        for process in processes:
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.wait_for(process.communicate(), 30)
            assert (process.returncode, "Traceback" in err.decode()) == (130, False), err.decode()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_reader_of_the_output_that_leaves_ends_it_though_nothing_comes(
    node: PrivateNode, bus: Bus, topology: Topology
) -> None:
    await publish(bus, topology, 1)
    shell = f"{sys.executable} -m trinity_mq.cli.main tap {topology.run} --from 1 --broker {node.url} | head -n 1"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f"{shell}; echo ${{PIPESTATUS[0]}}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    line, code = out.decode().splitlines()
    assert json.loads(line)["eid"]["batch"] == 1
    assert (code, "Traceback" in err.decode()) == ("1", False), err.decode()


async def test_each_line_comes_once_though_the_broker_is_restarted_and_the_runs_end_ends_it(
    node: PrivateNode, bus: Bus, topology: Topology
) -> None:
    await publish(bus, topology, 1)
    tap = await begin(topology.run, "--from", "beginning", "--broker", node.url)
    try:
        first = await lines(tap, GROUP)
        assert runs(first) == wanted(1)
        assert first[0]["tokens"] == [0, 1, 2, 3]
        assert "token_texts" in first[0], "all that inspect --json shows"
        await publish(bus, topology, 1, processed="another")  # a set more of the same batch
        await publish(bus, topology, 2)
        assert runs(await lines(tap, GROUP)) == wanted(2)
        await node.kill()
        await node.launch()
        await publish(bus, topology, 3)
        assert runs(await lines(tap, GROUP)) == wanted(3)
        end = envelope(RunEnd(batches=3), message_id="run-end")
        assert await bus.publish(topology.exchange("ready"), "end", end)
        out, err = await asyncio.wait_for(tap.communicate(), 30)
        assert (tap.returncode, out) == (0, b""), err.decode()
        async with await bus.consume(topology.ready, offset=0) as kept, asyncio.timeout(30):
            assert await anext(kept), "nothing was taken away"
    finally:
        if tap.returncode is None:
            tap.kill()
            await tap.wait()
