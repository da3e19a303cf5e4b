from __future__ import annotations

import asyncio

from tests.virtual import virtually
from trinity_mq.runtime.notify import Notifier


@virtually
async def test_everybody_who_waits_is_woken_once_and_asks_after_each_change() -> None:
    notifier, level, asked = Notifier(), [0], []

    def is_high() -> bool:
        asked.append(level[0])
        return level[0] >= 2

    notifier.notify()
    assert await notifier.wait(1.0) is False, "a notification is not kept for later"
    waits = [asyncio.create_task(notifier.wait(100.0)) for _ in range(3)]
    waiting = asyncio.create_task(notifier.until(is_high))
    for _ in range(2):
        await asyncio.sleep(1)
        level[0] += 1
        notifier.notify()
    assert await asyncio.gather(*waits) == [True] * 3
    await waiting
    assert asked == [0, 1, 2]
    await notifier.until(is_high)  # holds already: nobody needs to notify
