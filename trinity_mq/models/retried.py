"""Retries of calls by a tenacity policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying

T = TypeVar("T")


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
