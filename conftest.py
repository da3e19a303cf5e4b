"""What all test folders share: settings of the process, and fixtures."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

# The tests share the cores as processes; threads of torch that wait for each other took half of the time of its tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.broker_fixtures"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage, which took a quarter of the time: what imports make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
