"""A cancelled call ends its work before it gives way, and drops work that has not begun."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trinity_mq.runtime.threads import run_to_end


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_it_waits_for_the_end(pool: ThreadPoolExecutor, fails: bool) -> None:
    begun, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        ended.set()
        if fails:
            raise OSError("after the cancellation")

    running = asyncio.ensure_future(run_to_end(pool, work))
    await begun.wait()
    for _ in range(2):
        running.cancel()
        await asyncio.wait({running}, timeout=0.02)
        assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await running
    assert ended.is_set()
    assert isinstance(caught.value.__cause__, OSError) == fails


async def test_cancelled_before_it_began_it_never_runs(pool: ThreadPoolExecutor) -> None:
    go_on, ran = threading.Event(), threading.Event()
    first = asyncio.ensure_future(run_to_end(pool, go_on.wait))
    second = asyncio.ensure_future(run_to_end(pool, ran.set))
    await asyncio.wait({second}, timeout=0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    go_on.set()
    assert await first
    assert not ran.is_set()
