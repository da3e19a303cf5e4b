"""A call retried without tenacity where it goes well is, where it does not, what tenacity makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from tenacity import AsyncRetrying, RetryCallState, RetryError, retry_if_exception_type, stop_after_attempt

from trinity_mq.models.retried import call_with_retries

Caller = Callable[[Callable[[], AsyncRetrying], Callable[[str], Awaitable[str]], str], Awaitable[str]]


async def by_tenacity(
    policy: Callable[[], AsyncRetrying], function: Callable[[str], Awaitable[str]], argument: str
) -> str:
    result: str = await policy()(function, argument)
    return result


async def outcome_of(
    caller: Caller, failures: Sequence[Exception], attempts: int, *, reraise: bool
) -> tuple[str, int, list[tuple[int, str]]]:
    """Return how a call ended that fails so, how often it was made, and what was waited for."""
    left, calls, waits = list(failures), 0, []

    def wait(state: RetryCallState) -> float:
        assert state.outcome is not None
        waits.append((state.attempt_number, repr(state.outcome.exception())))
        return 0.0

    def policy() -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(attempts),
            wait=wait,
            retry=retry_if_exception_type(ValueError),
            sleep=lambda _: asyncio.sleep(0),
            reraise=reraise,
        )

    async def function(argument: str) -> str:
        nonlocal calls
        calls += 1
        if left:
            raise left.pop(0)
        return argument

    try:
        ended = await caller(policy, function, "done")
    except (ValueError, KeyError) as error:
        ended = repr(error)
    except RetryError as error:
        ended = f"{error.last_attempt.attempt_number} attempts, {error.last_attempt.exception()!r}"
    return ended, calls, waits


@pytest.mark.parametrize(
    "failures",
    [
        [],
        [ValueError("a")],
        [ValueError("a"), ValueError("b")],
        [ValueError("a"), ValueError("b"), ValueError("c")],
        [KeyError("a")],
        [ValueError("a"), KeyError("b")],
    ],
    ids=repr,
)
@pytest.mark.parametrize("attempts", [1, 2, 3])
@pytest.mark.parametrize("reraise", [True, False])
async def test_it_ends_as_tenacity_would_end_it(failures: list[Exception], attempts: int, reraise: bool) -> None:
    wanted = await outcome_of(by_tenacity, failures, attempts, reraise=reraise)

    assert await outcome_of(call_with_retries, failures, attempts, reraise=reraise) == wanted


async def test_without_a_failure_no_policy_is_asked_for() -> None:
    def policy() -> AsyncRetrying:
        raise AssertionError("nothing failed")

    assert await call_with_retries(policy, asyncio.sleep, 0, "done") == "done"


async def test_a_cancellation_ends_it() -> None:
    calls = 0

    async def function() -> None:
        nonlocal calls
        calls += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(call_with_retries(AsyncRetrying, function))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == 1
