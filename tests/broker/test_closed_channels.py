"""A channel that nobody reads any more, while messages are on their way to it, does not hold up its connection."""

from __future__ import annotations

import asyncio

import pytest

from trinity_mq.bus.rabbit.connection import BrokerConnection

MESSAGES = 2000
pytestmark = [pytest.mark.broker, pytest.mark.timeout(60)]


def readers() -> set[asyncio.Task[object]]:
    """The client's tasks that read channels."""
    return {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == "Channel._reader"}


async def test_other_channels_of_the_connection_go_on(broker_url: str) -> None:
    lost: list[str] = []
    link = await BrokerConnection.open(broker_url, "test", 10.0, lost.append)
    try:
        other = await link.channel()
        queue = (await other.queue_declare(exclusive=True)).queue
        assert queue is not None
        for _ in range(MESSAGES):
            await other.basic_publish(b"x" * 100, routing_key=queue)
        before = readers()
        channel = await link.channel()
        (reader,) = readers() - before

        async def receive(_: object) -> None:
            """Take no note of it."""

        await channel.basic_consume(queue, receive, no_ack=True)
        reader.cancel()  # as when its close takes longer than the client waits
        async with asyncio.timeout(8):  # below the three heartbeats after which the client gives a connection up
            await other.queue_declare(queue, passive=True)
        assert not lost
    finally:
        await link.close()
