from __future__ import annotations

import asyncio

import pytest

from tests.virtual import virtually
from trinity_mq.runtime.notify import Notifier


@virtually
async def test_everybody_who_waits_is_woken_once() -> None:
    notifier = Notifier()
    waits = [asyncio.create_task(notifier.wait(100.0)) for _ in range(3)]
    await asyncio.sleep(1)
    assert not any(task.done() for task in waits)
    notifier.notify()
    notifier.notify()
    assert await asyncio.gather(*waits) == [True] * 3
    assert asyncio.get_running_loop().time() == 1.0


@virtually
async def test_a_notification_is_not_kept_for_later() -> None:
    notifier = Notifier()
    notifier.notify()
    assert await notifier.wait(5.0) is False
    assert asyncio.get_running_loop().time() == 5.0


@virtually
async def test_until_asks_now_and_after_each_change() -> None:
    notifier, level, asked = Notifier(), 0, 0

    def high() -> bool:
        asked += 1
        return level >= 2

    waiting = asyncio.create_task(notifier.until(high))
    await asyncio.sleep(1)
    for _ in range(3):
        await asyncio.sleep(1)
        level += 1
        notifier.notify()
    await waiting
    assert asked == 3
    await notifier.until(high)  # holds already: nobody needs to notify


@virtually
async def test_one_that_gave_up_or_was_cancelled_leaves_nothing_behind() -> None:
    notifier = Notifier()
    await notifier.wait(1.0)
    task = asyncio.create_task(notifier.wait())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not notifier._waiters
    notifier.notify()
