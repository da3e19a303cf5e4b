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
from trinity_mq.runtime.process import wait_exit

ANSWER_SECONDS = 1.0
"""A broker that is alive answers within this."""


class OwnBroker:
    """A private broker that is started again, on the same data and port, when it dies.

    Args:
        folder: Its data, ports and password.
        config: Limits of restarts within a window.
        report: Called with a line for a person.
    """

    def __init__(self, folder: Path, config: SupervisorConfig, report: Callable[[str], None]) -> None:
        self._folder, self._config, self._report = folder, config, report

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Run it, and give its URL; stop it cleanly at the end.

        Raises:
            NodeError: It could not be started, or died too often.
        """
        node = await local_broker(self._folder)
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(self._keep(node), name="keep the broker")
                yield node.url
                keeping.cancel()
        finally:
            await node.stop()

    async def _keep(self, node: LocalNode) -> None:
        url, crashes, loop = node.url, collections.deque[float](), asyncio.get_running_loop()
        while True:
            if node.pid is not None:
                await wait_exit(node.pid)
            if await _answers(node):
                return  # in Docker on a machine whose processes we cannot see: its own restart policy is all there is
            crashes.append(loop.time())
            while crashes[0] <= loop.time() - self._config.restart_window:
                crashes.popleft()
            if len(crashes) > self._config.max_restarts:
                raise NodeError(f"the broker died {len(crashes)} times within {self._config.restart_window:g} s")
            self._report("the broker died and is started again")
            await node.kill()  # clears away what is left of it
            await node.launch()
            if node.url != url:
                raise NodeError("the broker died and another program took its port: start the run again")


async def _answers(node: LocalNode) -> bool:
    try:
        await node.wait_ready(ANSWER_SECONDS)
    except NodeError:
        return False
    return True
