"""Retries: which errors, how long between them, and on whose clock."""

from __future__ import annotations

import asyncio

import pytest
from tenacity import RetryCallState, wait_none

from trinity_mq.bus.retry import backoff, retrying


class FlakyError(Exception):
    """Goes away by itself."""


def waits(attempt: int) -> list[float]:
    state = RetryCallState(retrying(FlakyError), None, (), {})
    state.attempt_number = attempt
    wait = backoff(first=0.1, maximum=2.0)
    return [wait(state) for _ in range(200)]


def test_waits_are_drawn_below_a_bound_that_doubles_up_to_a_limit() -> None:
    for attempt, bound in ((1, 0.1), (2, 0.2), (4, 0.8), (10, 2.0)):
        drawn = waits(attempt)
        assert 0 <= min(drawn) < 0.3 * bound
        assert 0.7 * bound < max(drawn) <= bound


async def test_tries_again_only_what_it_was_told_to() -> None:
    tries: list[int] = []

    async def work() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise FlakyError
        return "done"

    assert await retrying(FlakyError, wait=wait_none())(work) == "done"
    assert len(tries) == 3

    async def broken() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await retrying(FlakyError)(broken)


async def test_tells_before_each_pause_and_ends_with_its_timeout() -> None:
    told: list[int] = []

    async def work() -> None:
        raise FlakyError

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await retrying(FlakyError, wait=wait_none(), before_sleep=lambda state: told.append(state.attempt_number))(
                work
            )
    assert told[:3] == [1, 2, 3]
