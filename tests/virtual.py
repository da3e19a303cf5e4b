"""Tests that are coroutines in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from trinity_mq.testing.virtual_time import run_virtually


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in virtual time, in which an hour of waiting takes no real time."""

    @functools.wraps(test)
    def run(*args: Any, **fields: Any) -> None:
        run_virtually(test(*args, **fields))

    return run
