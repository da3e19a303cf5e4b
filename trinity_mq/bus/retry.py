"""Retries by tenacity with jitter, so that many agents do not reconnect to a broker at the same moment."""

from __future__ import annotations

from collections.abc import Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from tenacity.wait import wait_base


def backoff(first: float = 0.1, maximum: float = 10.0) -> wait_base:
    """Return a wait drawn between 0 and a bound that doubles from ``first`` to ``maximum`` seconds ("full jitter")."""
    return wait_random_exponential(multiplier=first, max=maximum)


def retrying(
    *errors: type[BaseException],
    wait: wait_base | None = None,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> AsyncRetrying:
    """Return an endless retry of ``errors``; bound it by ``asyncio.timeout``, which follows the loop's own clock.

    Args:
        errors: Exceptions that are tried again; any other passes through at once.
        wait: Pause between attempts, :func:`backoff` unless given.
        before_sleep: Called before each pause, to log what went wrong.
    """
    return AsyncRetrying(
        retry=retry_if_exception_type(errors), wait=wait or backoff(), before_sleep=before_sleep, reraise=True
    )
