"""Reading a stream up to our own mark: a reader at an offset beyond the end would wait for ever."""

from __future__ import annotations

import asyncio

from trinity_mq.bus import Bus, Consumer, Delivery

LOOK = 1.0
"""Seconds after which we look whether the bus was usable: only then silence means something."""


async def next_or_quiet(bus: Bus, feed: Consumer, seconds: float) -> Delivery | None:
    """Return the next delivery, None after ``seconds`` of silence in a row on a usable bus.

    An outage starts the count anew: what was published meanwhile needs its time to arrive.
    """
    quiet = 0.0
    while quiet < seconds:
        try:
            async with asyncio.timeout(min(LOOK, seconds)):
                return await anext(feed)
        except TimeoutError:
            quiet = quiet + LOOK if bus.usable else 0.0
    return None
