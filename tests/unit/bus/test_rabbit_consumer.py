"""The position of a stream's consumer over the deliveries of a channel."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_mq.bus.rabbit.consumer import RabbitConsumer
from trinity_mq.bus.topology import Topology


class Channel:
    """A channel that records the offset at which the stream is consumed."""

    is_closed = False

    def __init__(self) -> None:
        self.on_consumer_cancel_callbacks: set[Any] = set()
        self.closing = asyncio.get_running_loop().create_future()

    async def basic_qos(self, **_: Any) -> None: ...

    async def basic_ack(self, *_: Any, **__: Any) -> None: ...

    async def basic_consume(self, name: str, receive: Any, *, arguments: dict[str, Any], **_: Any) -> Any:
        self.offset, self.receive = arguments["x-stream-offset"], receive
        return SimpleNamespace(consumer_tag="t")

    async def close(self, **_: Any) -> None: ...


@pytest.mark.parametrize("buffered", [False, True])
async def test_a_refused_message_is_not_read_again_after_a_reconnect(buffered: bool) -> None:
    """``buffered``: an earlier message of the stream has arrived and is not handed over yet."""
    queue = Topology("r").ready
    first, second = Channel(), Channel()
    channels = iter((first, second))

    async def channel() -> Any:
        return next(channels)

    def message(offset: int, exchange: str) -> Any:
        names = dict.fromkeys(("content_type", "message_id", "correlation_id", "reply_to"))
        header = SimpleNamespace(properties=SimpleNamespace(headers={"x-stream-offset": offset}, **names))
        return SimpleNamespace(header=header, exchange=exchange, routing_key="x", body=b"", delivery_tag=offset)

    link: Any = SimpleNamespace(channel=channel)
    consumer = RabbitConsumer(queue, 0, 7, lambda: None, lambda _: None)
    await consumer.attach(link)
    await first.receive(message(7, queue.bindings[0].exchange))
    if not buffered:
        assert consumer.get_nowait() is not None
    await first.receive(message(8, "another.exchange"))
    if buffered:
        assert consumer._next == 7, "the message that is not handed over is read again"
        assert consumer.get_nowait() is not None
    first.is_closed = True
    await consumer.attach(link)
    assert second.offset == 9
    await consumer.close()
