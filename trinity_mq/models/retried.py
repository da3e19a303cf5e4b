"""Retries of calls by a tenacity policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.runtime.event_loop import loop_time

T = TypeVar("T")

LOST_PAUSE = 0.25
"""Seconds before the retry after an engine was lost."""


def engine_retries(seconds: float, *, others: bool = False) -> dict[str, Any]:
    """Return the tenacity arguments for retries of a request to an engine that is not ready.

    Args:
        seconds: Seconds from now after which a failed try is not retried.
        others: Retry also after an engine was lost, because another engine may answer.
    """
    deadline = loop_time() + seconds
    return {
        "retry": retry_if_exception_type((EngineNotReady, EngineLost) if others else EngineNotReady),
        "wait": _pause,
        "stop": lambda state: loop_time() >= deadline,
        "reraise": True,
    }


def _pause(state: RetryCallState) -> float:
    """Return the number of seconds that the engine asked to wait, or the pause after a lost engine."""
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, EngineNotReady) else LOST_PAUSE


async def call_with_retries(
    policy: Callable[[], AsyncRetrying], function: Callable[..., Awaitable[T]], *arguments: Any
) -> T:
    """Return the result of ``function``, retried as ``policy`` decides.

    The policy object is created only after the first failure, which it then counts as its first attempt. Its
    bookkeeping takes longer than the work around one request of a slice. Limits in seconds count from its creation.
    """
    try:
        return await function(*arguments)
    except Exception as error:
        failures = [error]

    async def again() -> T:
        if failures:
            raise failures.pop()  # the failure of the first attempt, which the policy counts
        return await function(*arguments)

    return await policy()(again)
