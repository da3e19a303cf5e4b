"""Retries: which errors, how long between them, and on whose clock."""

from __future__ import annotations

import asyncio

import pytest
from tenacity import RetryCallState, wait_none

from trinity_mq.bus.retry import backoff, retrying


class FlakyError(Exception):
    """Goes away by itself."""


def test_waits_are_drawn_below_a_bound_that_doubles_up_to_a_limit() -> None:
    state, wait = RetryCallState(retrying(FlakyError), None, (), {}), backoff(first=0.1, maximum=2.0)
    for state.attempt_number, bound in ((1, 0.1), (2, 0.2), (4, 0.8), (10, 2.0)):
        drawn = [wait(state) for _ in range(200)]
        assert 0 <= min(drawn) < 0.3 * bound
        assert 0.7 * bound < max(drawn) <= bound


async def test_tries_again_only_what_it_was_told_to_until_its_timeout_and_tells_before_each_pause() -> None:
    told: list[int] = []

    async def work() -> str:
        if len(told) < 3:
            raise FlakyError
        return "done"

    async def broken() -> None:
        raise KeyError("a bug")

    retries = retrying(FlakyError, wait=wait_none(), before_sleep=lambda state: told.append(state.attempt_number))
    assert await retries(work) == "done"
    assert told == [1, 2, 3]
    with pytest.raises(KeyError):
        await retries(broken)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await retrying(KeyError, wait=wait_none())(broken)
