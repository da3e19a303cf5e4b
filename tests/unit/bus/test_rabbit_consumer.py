"""What a consumer asks of its channel: its prefetch, and the position of a stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp.commands import Basic

from trinity_mq.bus.rabbit.consumer import RabbitConsumer
from trinity_mq.bus.topology import Topology


class Channel:
    """A channel that records the prefetch and the offset at which the stream is consumed."""

    is_closed = False

    def __init__(self) -> None:
        self.on_consumer_cancel_callbacks: set[Any] = set()
        self.closing = asyncio.get_running_loop().create_future()

    async def basic_qos(self, *, prefetch_count: int) -> None:
        Basic.Qos(prefetch_count=prefetch_count).marshal()  # as the client does
        self.prefetch = prefetch_count

    async def basic_ack(self, *_: Any, **__: Any) -> None: ...

    async def basic_consume(self, name: str, receive: Any, *, arguments: dict[str, Any], **_: Any) -> Any:
        self.offset, self.receive = arguments.get("x-stream-offset"), receive
        return SimpleNamespace(consumer_tag="t")

    async def close(self, **_: Any) -> None: ...


def link(*channels: Channel) -> Any:
    """Return a connection that opens these channels."""
    waiting = iter(channels)

    async def channel() -> Channel:
        return next(waiting)

    return SimpleNamespace(channel=channel)


async def test_a_prefetch_above_what_amqp_can_encode_is_the_largest_one() -> None:
    channel = Channel()
    await RabbitConsumer(Topology("r").dead, 70_000, None, lambda: None, lambda _: None).attach(link(channel))
    assert channel.prefetch == 65_535


@pytest.mark.parametrize(("handed_over", "offset"), [("before", 9), ("after", 9), ("never", 7)])
async def test_a_refused_message_is_not_read_again_after_a_reconnect(handed_over: str, offset: int) -> None:
    """``handed_over``: when an earlier message of the stream is handed over, relative to the refused message."""
    queue = Topology("r").ready
    first, second = Channel(), Channel()
    broker = link(first, second)

    def message(offset: int, exchange: str) -> Any:
        names = dict.fromkeys(("content_type", "message_id", "correlation_id", "reply_to"))
        header = SimpleNamespace(properties=SimpleNamespace(headers={"x-stream-offset": offset}, **names))
        return SimpleNamespace(header=header, exchange=exchange, routing_key="x", body=b"", delivery_tag=offset)

    consumer = RabbitConsumer(queue, 0, 7, lambda: None, lambda _: None)
    await consumer.attach(broker)
    await first.receive(message(7, queue.bindings[0].exchange))
    if handed_over == "before":
        assert consumer.get_nowait() is not None
    await first.receive(message(8, "another.exchange"))
    if handed_over == "after":
        assert consumer.get_nowait() is not None
    first.is_closed = True
    await consumer.attach(broker)
    assert second.offset == offset
    await consumer.close()
