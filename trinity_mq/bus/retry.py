"""Retries and their pauses, based on tenacity. Random pauses prevent all agents from reconnecting to a broker at the
same moment. :func:`exponential_pause` is not random.
"""

from __future__ import annotations

from collections.abc import Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from tenacity.wait import wait_base


def backoff(first: float = 0.1, maximum: float = 10.0) -> wait_base:
    """Return a wait policy: each pause is drawn between 0 and a bound that doubles from ``first`` to ``maximum``
    seconds ("full jitter").
    """
    return wait_random_exponential(multiplier=first, max=maximum)


def exponential_pause(first: float, maximum: float, failures: int) -> float:
    """Return the pause in seconds after some failures in a row: it doubles from ``first`` to ``maximum`` seconds.

    >>> [exponential_pause(0.25, 1.5, failures) for failures in (1, 2, 3, 4, 10_000)]
    [0.25, 0.5, 1.0, 1.5, 1.5]
    """
    return min(maximum, first * 2.0 ** min(failures - 1, 60))


def retrying(
    *errors: type[BaseException],
    wait: wait_base | None = None,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> AsyncRetrying:
    """Return an endless retry for ``errors``. Bound it by ``asyncio.timeout``, which follows the clock of the loop.

    Args:
        errors: Exceptions to retry. Other exceptions are raised immediately.
        wait: Pause between attempts. None: :func:`backoff`.
        before_sleep: Called before each pause, for example to log the error.
    """
    return AsyncRetrying(
        retry=retry_if_exception_type(errors), wait=wait or backoff(), before_sleep=before_sleep, reraise=True
    )
