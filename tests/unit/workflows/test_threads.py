import asyncio
import threading
import time

import pytest

from tests.waiting import until
from trinity_mq.runtime.threads import in_thread, interrupt, stuck_threads
from trinity_mq.workflows import Workflow, execute


async def ended(thread, seconds=5):
    await asyncio.to_thread(thread.join, seconds)
    assert not thread.is_alive()


async def cancelled(coroutine, begun):
    """Cancel ``coroutine`` once ``begun`` is set, and see it end at once."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    async with asyncio.timeout(1):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_thread_given_up_is_counted_until_it_ends():
    begun, release, threads = threading.Event(), threading.Event(), []

    def work():
        threads.append(threading.current_thread())
        begun.set()
        release.wait()

    loop = asyncio.get_running_loop()
    await cancelled(in_thread(work, "w"), begun)
    given_up = loop.time()
    assert stuck_threads(given_up - 1) == []
    assert stuck_threads(given_up) == ["w"]
    release.set()
    await ended(threads[0])
    assert stuck_threads(given_up) == []


async def test_a_thread_is_used_again_and_has_the_name_of_its_call():
    def seen():
        return threading.current_thread(), threading.current_thread().name

    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: next(iter([])), "test")
    first, name = await in_thread(seen, "first")
    assert name == "first"
    await until(lambda: first.name == "idle")
    found = [await in_thread(seen, f"call {number}") for number in range(20)]
    assert [name for _, name in found] == [f"call {number}" for number in range(20)]
    assert first in {thread for thread, _ in found}
    assert len({thread for thread, _ in found}) < 20


async def test_a_call_meets_no_interruption_that_was_meant_for_an_earlier_one():
    """Each other call is cancelled at about the moment at which it ends; none of those between may notice."""

    def work(seconds):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            sum(range(50))
        return seconds

    for number in range(200):
        seconds = number % 20 * 1e-4
        given_up = asyncio.ensure_future(in_thread(lambda seconds=seconds: work(seconds), "given up", interrupt))
        await asyncio.sleep(0.001)
        given_up.cancel()
        kept = [asyncio.ensure_future(in_thread(lambda: work(1e-4), "kept", interrupt)) for _ in range(3)]
        assert await asyncio.gather(*kept) == [1e-4] * 3
        await asyncio.wait([given_up])


async def test_interrupting_what_holds_on_changes_nothing_for_others():
    begun, release, threads = threading.Event(), threading.Event(), []

    def work():
        threads.append(threading.current_thread())
        begun.set()
        while not release.is_set():
            try:
                time.sleep(0.001)
            except BaseException:  # as bad as can be
                continue

    await cancelled(in_thread(work, "w", interrupt), begun)
    assert await in_thread(lambda: 5, "other") == 5
    assert threads[0].is_alive()
    release.set()
    await ended(threads[0])


async def test_cancelling_reaches_a_loop_of_its_own():
    begun, ends, closed = threading.Event(), threading.Event(), []

    class Waits(Workflow):
        is_async = True

        async def run_async(self):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.set()

    async def close():
        closed.append(1)

    await cancelled(execute(lambda: Waits(task=None, model=None), Waits, close=close, own_loop=True), begun)
    assert await asyncio.to_thread(ends.wait, 5)
    await asyncio.sleep(0.05)
    assert closed == [1]
