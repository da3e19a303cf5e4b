"""Tests in virtual time: a conftest.py imports these, and a module says ``LOOP = VirtualTimeLoop``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any
from unittest import mock

import pytest

wrap_future = asyncio.wrap_future


def pytest_asyncio_loop_factories(item: pytest.Function) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the coroutines of a module in the kind of loop that it names."""
    return {"loop": getattr(item.module, "LOOP", asyncio.SelectorEventLoop)}


@pytest.fixture(autouse=True)
def threads_in_virtual_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for threads as run_virtually() does: otherwise the virtual clock would advance while a thread works."""

    def wrap_finished(future: Future[Any], *, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Future[Any]:
        wait([future])
        return wrap_future(future, loop=loop)

    replaced = wrap_finished if hasattr(request.module, "LOOP") else wrap_future
    with mock.patch.object(asyncio, "wrap_future", replaced):
        yield
