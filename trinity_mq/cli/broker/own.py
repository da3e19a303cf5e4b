"""A private broker that is kept alive during a run."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trinity_mq.config import SupervisorConfig
from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.choose import local_broker
from trinity_mq.local_broker.node import NodeError
from trinity_mq.runtime.process import disk_full, wait_exit


@contextlib.asynccontextmanager
async def own_broker(folder: Path, config: SupervisorConfig, report: Callable[[str], None]) -> AsyncIterator[str]:
    """Run a private broker and give its URL; one that dies is started again, on the same data and port.

    Args:
        folder: Its data, ports and password.
        config: Limits of restarts within a window.
        report: Called with a line for a person.

    Raises:
        NodeError: It could not be started, or died too often.
    """
    node = await local_broker(folder)
    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(_keep(node, folder, config, report), name="keep the broker")
            yield node.url
            keeping.cancel()
    finally:
        await node.stop()


async def _keep(node: LocalNode, folder: Path, config: SupervisorConfig, report: Callable[[str], None]) -> None:
    url, crashes, loop = node.url, collections.deque[float](), asyncio.get_running_loop()
    while True:
        if node.pid is not None:
            await wait_exit(node.pid)
        crashes.append(loop.time())
        while crashes[0] <= loop.time() - config.restart_window:
            crashes.popleft()
        if len(crashes) > config.max_restarts:
            raise NodeError(f"the broker died {len(crashes)} times within {config.restart_window:g} s")
        report("the broker died and is started again")
        await node.kill()  # clears away what is left of it
        try:
            await node.launch()
        except OSError as error:
            why = disk_full(error) or error.strerror or str(error)
            raise NodeError(f"the broker died and cannot be started again in {folder}: {why}") from error
        if node.url != url:
            raise NodeError("the broker died and another program took its port: start the run again")
