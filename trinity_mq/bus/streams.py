"""Stream reads with a limit on silence: a reader at an offset beyond the end would wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from trinity_mq.bus import Bus, BusUnavailable, Consumer, Delivery, Envelope, Queue, StreamCut

POLL_SECONDS = 1.0
"""Seconds between checks that the bus is usable: silence counts only on a usable bus."""


async def next_or_quiet(bus: Bus, consumer: Consumer, seconds: float) -> Delivery | None:
    """Return the next delivery, None after ``seconds`` of silence in a row on a usable bus.

    An outage starts the count anew: what was published meanwhile needs its time to arrive.
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
    bus: Bus, stream: Queue, mark: Envelope, *, offset: int | None = None, seconds: float = 60.0
) -> AsyncIterator[Delivery]:
    """Yield what is on a stream, up to and with ``mark``, which is published now.

    Args:
        bus: A connected bus.
        stream: The stream, bound to one exchange for everything.
        mark: A message with an id of its own.
        offset: First position; what retention has cut is passed over. None: the present end, so that ``mark`` tells it.
        seconds: Longest silence on a usable bus.

    Raises:
        BusUnavailable: The mark did not arrive.
    """
    published = False
    while True:
        async with await bus.consume(stream, offset=offset) as feed:
            if not published:
                published = await bus.publish(stream.bindings[0].exchange, "mark", mark)
            try:
                while (delivery := await next_or_quiet(bus, feed, seconds)) is not None:
                    yield delivery
                    if delivery.message_id == mark.message_id:
                        return
            except StreamCut as cut:
                offset = cut.got
                continue
        raise BusUnavailable(
            f"the stream {stream.name} did not deliver within {seconds:g} s what was published to it: see its state "
            "with `rabbitmqctl list_queues name state`, and delete it with `trinity-mq broker clean` if it is broken"
        )


async def read_at(bus: Bus, stream: Queue, offsets: Collection[int], seconds: float) -> dict[int, Delivery]:
    """Return the messages at ``offsets`` of a stream by offset; those beyond its end are left out after ``seconds`` of
    silence.

    Raises:
        StreamCut: Retention has cut the first of them.
    """
    found: dict[int, Delivery] = {}
    missing = set(offsets)
    if not missing:
        return found
    async with await bus.consume(stream, prefetch=len(missing), offset=min(missing)) as consumer:
        while missing and (delivery := await next_or_quiet(bus, consumer, seconds)) is not None:
            if (offset := delivery.offset) is not None and offset in missing:
                found[offset] = delivery
                missing.discard(offset)
    return found
