"""Calls that are tried again as a policy of tenacity says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying

T = TypeVar("T")


async def retried(policy: Callable[[], AsyncRetrying], function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Return what ``function`` returns, tried again as ``policy`` says.

    The policy is made, and sees the first failure, once there is one: its bookkeeping takes longer than the work around
    a request of a slice. What it counts in seconds begins then.
    """
    try:
        return await function(*arguments)
    except Exception as error:
        failures = [error]

    async def again() -> T:
        if failures:
            raise failures.pop()  # the first try's, which counts as one
        return await function(*arguments)

    return await policy()(again)
