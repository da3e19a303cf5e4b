"""A quorum queue that nobody leads, as a real broker can have one after a crash: its owner replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.broker_fixtures import Tools, connected, note
from tests.waiting import until
from trinity_mq.bus.base import Queue
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.dispatch import batch_queues
from trinity_mq.dispatch.batch_queues import BatchQueues
from trinity_mq.dispatch.tickets import new_ticket
from trinity_mq.messages import TaskBody

LOSE_LEADER = (
    "[begin {{Name, _}} = amqqueue:get_pid(Q), ok = ra:force_delete_server(quorum_queues, {{Name, node()}}), "
    "rabbit_quorum_queue:recover(element(2, amqqueue:get_name(Q)), [Q]) end "
    '|| Q <- rabbit_amqqueue:list(), element(4, amqqueue:get_name(Q)) =:= <<"{name}">>], ok.'
)
"""What a broker does at its start with a queue that it has no data of: it begins one for which nobody calls an
election."""
LOOKS_FOR = 2.0

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(batch_queues, "PATIENCE", LOOKS_FOR)
    with capture_logs() as found:
        yield found


@pytest.fixture
async def runner(broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    async with connected(broker_url, topology) as made:
        yield made


async def test_what_waited_for_its_confirm_is_taken_by_the_new_one(
    bus: RabbitBus, runner: RabbitBus, broker_node: Tools, topology: Topology, logs: list[Any]
) -> None:
    owner = bus
    ticket = new_ticket(1, [TaskBody(workflow="x")], deliver="pipeline", lane="train", time_left=1.0)
    ticket.published = True
    queue = topology.batch_queue(1, ticket.ticket)
    await owner.declare(topology.dead, queue)
    await broker_node.ctl("eval", LOSE_LEADER.format(name=queue.name))
    part = note("part", message_id="part-0")
    key = topology.batch_routing_key(1, ticket.ticket)

    async def deliver() -> None:
        while not await runner.publish(topology.exchange("experiences"), key, part):  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # it came between the old one's end and the new one's beginning

    publishing = asyncio.create_task(deliver())
    _, pending = await asyncio.wait([publishing], timeout=LOOKS_FOR)
    assert pending, "a queue without a leader confirmed something: it is not what this test is about"
    await owner.declare(queue)  # as a restarted explorer does: it is there, and that does not help
    watching = asyncio.create_task(BatchQueues(owner, topology, lambda: [ticket]).watch())
    try:
        await publishing
        await until(lambda: _deeper_than(owner, queue.name, 1), 30)  # the mark
    finally:
        watching.cancel()
    assert b"part" in await _bodies(owner, queue)
    assert [entry["event"] for entry in logs if "batch_queue" in entry["event"]] == ["batch_queue_replaced"]


async def _deeper_than(bus: RabbitBus, name: str, depth: int) -> bool:
    return (await bus.depth(name) or 0) > depth


async def _bodies(bus: RabbitBus, queue: Queue) -> list[bytes]:
    """Return what is in a queue, taking nothing."""
    depth = await bus.depth(queue.name) or 0
    async with asyncio.timeout(30), await bus.consume(queue) as feed:
        return [(await anext(feed)).body for _ in range(depth)]
