"""Tests here may run in virtual time."""

from tests.virtual import pytest_asyncio_loop_factories, threads_in_virtual_time

__all__ = ["pytest_asyncio_loop_factories", "threads_in_virtual_time"]
