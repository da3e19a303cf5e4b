"""Commands that clean up on their way out."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from trinity_mq.runtime.event_loop import run_until_complete


def test_what_is_done_is_returned_and_what_is_raised_is_raised() -> None:
    async def work() -> int:
        return 3

    async def fails() -> None:
        async with asyncio.TaskGroup():
            raise ArithmeticError("mine")

    assert run_until_complete(work()) == 3
    with pytest.raises(ExceptionGroup) as caught:
        run_until_complete(fails())
    assert caught.value.subgroup(ArithmeticError) is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_and_what_is_open_is_closed(number: signal.Signals) -> None:
    closed = False

    async def work() -> None:
        nonlocal closed
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed = True

    before = signal.getsignal(signal.SIGTERM)
    # a shell starts what it puts into the background with SIGINT ignored
    of_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_until_complete(work())
    finally:
        signal.signal(signal.SIGINT, of_interrupt)
    assert closed
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_reader_that_has_left_is_told_as_such() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_until_complete(work())
