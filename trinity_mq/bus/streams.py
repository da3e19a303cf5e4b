"""Stream reads with a limit on silence. A reader at an offset beyond the end would wait forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from trinity_mq.bus import Bus, BusUnavailable, Consumer, Delivery, Envelope, Queue, StreamCut

POLL_SECONDS = 1.0
"""Seconds between checks that the bus is usable. Silence counts only while the bus is usable."""


async def next_or_quiet(bus: Bus, consumer: Consumer, seconds: float) -> Delivery | None:
    """Return the next delivery. Return None after ``seconds`` of uninterrupted silence on a usable bus.

    An outage restarts the count, because messages published during the outage need time to arrive.
    """
    quiet = 0.0
    while quiet < seconds:
        try:
            async with asyncio.timeout(min(POLL_SECONDS, seconds)):
                return await anext(consumer)
        except TimeoutError:
            quiet = quiet + POLL_SECONDS if bus.usable else 0.0
    return None


async def read_up_to_now(
    bus: Bus, stream: Queue, mark: Envelope, *, offset: int | None = None, key: str = "mark", seconds: float = 60.0
) -> AsyncIterator[Delivery]:
    """Yield the messages on a stream, up to and including ``mark``, which is published now.

    Args:
        bus: A connected bus.
        stream: The stream. It must be bound to a single exchange with a pattern that matches everything.
        mark: A message with a unique id.
        offset: First offset. Messages that retention removed are skipped. None: the current end, so that ``mark``
            reveals the offset of the end.
        key: Routing key of the mark.
        seconds: Maximum seconds of silence on a usable bus.

    Raises:
        BusUnavailable: The mark did not arrive.
    """
    published = False
    while True:
        async with await bus.consume(stream, offset=offset) as feed:
            if not published:
                published = await bus.publish(stream.bindings[0].exchange, key, mark)
            try:
                while (delivery := await next_or_quiet(bus, feed, seconds)) is not None:
                    yield delivery
                    if delivery.message_id == mark.message_id:
                        return
            except StreamCut as cut:
                offset = cut.got
                continue
        raise BusUnavailable(
            f"the stream {stream.name} did not deliver within {seconds:g} s a message that was published to it: see "
            "its state with `rabbitmqctl list_queues name state`, and delete it with `trinity-mq broker clean` if it "
            "is broken"
        )


async def read_at(bus: Bus, stream: Queue, offsets: Collection[int], seconds: float) -> dict[int, Delivery]:
    """Return the messages at ``offsets`` of a stream, by offset. Offsets without a message, such as offsets beyond the
    end, are left out after ``seconds`` of silence.

    Raises:
        StreamCut: Retention removed the first of the messages.
    """
    messages: dict[int, Delivery] = {}
    missing = set(offsets)
    if not missing:
        return messages
    async with await bus.consume(stream, prefetch=len(missing), offset=min(missing)) as consumer:
        while missing and (delivery := await next_or_quiet(bus, consumer, seconds)) is not None:
            if (offset := delivery.offset) is not None and offset in missing:
                messages[offset] = delivery
                missing.discard(offset)
    return messages
