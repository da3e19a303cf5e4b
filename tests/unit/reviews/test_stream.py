"""The stream of reviews as a reader follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from trinity_mq.bus import Bus, QueueGone, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.reviews.stream import NoReviews, ReviewStream

TOPOLOGY = Topology("r")


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    found = MemoryBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
    await found.connect()
    yield found
    await found.close()


async def test_where_nobody_asks_there_are_no_reviews(bus: Bus) -> None:
    with pytest.raises(NoReviews, match="none of its operators requests reviews"):
        async with ReviewStream(bus, TOPOLOGY).following():
            pass


async def test_a_stream_that_is_deleted_ends_the_block_of_its_reader(bus: Bus) -> None:
    await bus.declare(TOPOLOGY.review)

    async def look() -> None:
        async with ReviewStream(bus, TOPOLOGY).following():
            await bus.delete(TOPOLOGY.review.name)
            await asyncio.Event().wait()

    with pytest.raises(QueueGone):
        await asyncio.wait_for(look(), 10)


async def test_an_error_of_the_block_comes_out_as_it_is(bus: Bus) -> None:
    await bus.declare(TOPOLOGY.review)
    with pytest.raises(KeyError, match="mine"):
        async with ReviewStream(bus, TOPOLOGY).following():
            raise KeyError("mine")
