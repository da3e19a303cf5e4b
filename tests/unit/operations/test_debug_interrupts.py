"""Commands that clean up on their way out."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from trinity_mq.runtime.event_loop import run_until_complete


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
