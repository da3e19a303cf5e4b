"""Exclusive queues that the broker takes away while their connection stands, as the end of a cluster's node may: names
and locks are what the owner still has afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs

from tests.broker_fixtures import Tools
from tests.waiting import until
from trinity_mq.bus.base import Envelope, LockHeld
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig

DELETE = (
    "[rabbit_amqqueue:delete(Q, false, false, <<>>) || Q <- rabbit_amqqueue:list(), "
    'string:prefix(element(4, amqqueue:get_name(Q)), <<"{prefix}">>) =/= nomatch, '
    "amqqueue:get_exclusive_owner(Q) =/= none], ok."
)
"""Of all queues with this prefix those that belong to a connection."""

pytestmark = [pytest.mark.broker, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


@pytest.fixture
async def buses(broker_url: str, topology: Topology) -> AsyncIterator[tuple[RabbitBus, RabbitBus]]:
    made = [RabbitBus(broker_url, topology, config=BrokerConfig(), name=name) for name in ("owner", "other")]
    for bus in made:
        await bus.connect()
    yield made[0], made[1]
    for bus in made:
        await bus.close()


async def test_they_come_back_with_their_bindings_and_the_locks_with_them(
    buses: tuple[RabbitBus, RabbitBus], broker_node: Tools, topology: Topology
) -> None:
    owner, other = buses
    ears = topology.listener("explorer-0", "x", "control", "#")
    lock = await owner.lock("explorer")
    async with await owner.consume(ears) as feed:
        await broker_node.ctl("eval", DELETE.format(prefix=topology.prefix))

        async def heard() -> bool:
            note = Envelope(body=b"hello", kind="note")
            return await other.publish(topology.exchange("control"), "control.all", note)

        await until(heard, 20)
        async with asyncio.timeout(10):
            assert (await anext(feed)).body == b"hello"
    assert lock.held
    with pytest.raises(LockHeld):
        await other.lock("explorer")
