"""A private broker that is kept running during a run."""

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
from trinity_mq.runtime.process import disk_full_message, wait_exit


@contextlib.asynccontextmanager
async def private_broker(folder: Path, config: SupervisorConfig, report: Callable[[str], None]) -> AsyncIterator[str]:
    """Run a private broker and yield its URL. If it dies, it is restarted with the same data and port.

    Args:
        folder: Folder with its data, ports and password.
        config: Settings with the maximum restarts in a time window.
        report: Called with a line of text for a person.

    Raises:
        NodeError: The broker could not be started, or died too often.
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
        await node.kill()  # removes the remains of the dead broker
        try:
            await node.launch()
        except OSError as error:
            why = disk_full_message(error) or error.strerror or str(error)
            raise NodeError(f"the broker died and cannot be started again in {folder}: {why}") from error
        if node.url != url:
            raise NodeError("the broker died and another program took its port: start the run again")
