"""A run that is over leaves a mark; who is started or connected again after that ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.unit.runtime.test_agent import Idler
from trinity_mq.bus.memory.bus import MemoryBroker
from trinity_mq.runtime.process import mark_run_over
from trinity_mq.testing.virtual_time import run_virtually


class Latecomer(Idler):
    """Notes whether it was let work."""

    served = False

    async def serve(self) -> None:
        self.served = True


class Follower(Idler):
    """Works until the run is over."""

    async def serve(self) -> None:
        await self.woken.until(lambda: self.peers.explorer.finished)


def test_who_comes_after_the_end_ends_too(tmp_path: Path) -> None:
    def lives(over: bool) -> Latecomer:
        latecomer = Latecomer(MemoryBroker())
        latecomer.run_folder = tmp_path
        if over:
            mark_run_over(tmp_path)
        with capture_logs():
            run_virtually(latecomer.run())
        return latecomer

    before, after = lives(False), lives(True)
    assert before.served
    assert not after.served
    assert after.state == "finished"


def follow(folder: Path, scene: Callable[[Follower, asyncio.Task[None]], Awaitable[None]]) -> Follower:
    """Run a follower and ``scene`` beside it, until it has ended."""
    follower = Follower(MemoryBroker())
    follower.run_folder = folder

    async def main() -> None:
        task = asyncio.create_task(follower.run())
        await asyncio.sleep(1.0)
        await scene(follower, task)
        await task

    with capture_logs():
        run_virtually(main(), limit=200)
    return follower


@pytest.mark.parametrize("seconds", [0.5, 100.0], ids=["a moment", "longer than any lease"])
def test_who_is_cut_off_at_the_end_ends_when_it_is_back(tmp_path: Path, seconds: float) -> None:
    async def cut_off(follower: Follower, task: asyncio.Task[None]) -> None:
        follower.bus.disconnect("connection lost")  # type: ignore[attr-defined]
        mark_run_over(tmp_path)
        await asyncio.sleep(seconds)
        assert not task.done()
        follower.bus.reconnect()  # type: ignore[attr-defined]

    assert follow(tmp_path, cut_off).state == "finished"


def test_an_outage_while_the_run_goes_on_ends_nobody(tmp_path: Path) -> None:
    async def outages(follower: Follower, task: asyncio.Task[None]) -> None:
        for is_last in (False, False, True):
            if is_last:
                mark_run_over(tmp_path)
            follower.bus.disconnect("connection lost")  # type: ignore[attr-defined]
            await asyncio.sleep(5.0)
            follower.bus.reconnect()  # type: ignore[attr-defined]
            await asyncio.sleep(30.0)
            assert task.done() == is_last

    follow(tmp_path, outages)
