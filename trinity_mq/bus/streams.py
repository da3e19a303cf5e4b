"""Stream reads with a limit on silence: a reader at an offset beyond the end would wait for ever."""

from __future__ import annotations

import asyncio

from trinity_mq.bus import Bus, Consumer, Delivery

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
