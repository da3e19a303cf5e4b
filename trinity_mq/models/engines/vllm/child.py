"""vLLM's server as our child: started, awaited, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

import structlog
from tenacity import AsyncRetrying, retry_if_result, wait_fixed

from trinity_mq.models.engines.host.ready_file import TOKEN_VARIABLE
from trinity_mq.models.engines.vllm.client import VllmClient
from trinity_mq.models.errors import EngineFailed

log = structlog.get_logger(__name__)

ASK_EVERY = 0.2
STOP_SECONDS = 10.0
"""From the request to end to the kill: nothing it holds is worth more."""


class VllmChild:
    """One server process; its output goes where ours goes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, command: Sequence[str], environment: Mapping[str, str]) -> VllmChild:
        """Start it. It ends when we do, however that happens."""
        ours = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, env={**ours, **environment}
        )
        log.info("vllm_started", pid=process.pid)
        return cls(process)

    async def ready(self, client: VllmClient) -> None:
        """Return when it takes requests. How long that may take, our own host decides.

        Raises:
            EngineFailed: It ended before.
        """
        async with asyncio.TaskGroup() as group:
            dying = group.create_task(self._process.wait())
            asking = group.create_task(_until_healthy(client))
            await asyncio.wait({dying, asking}, return_when=asyncio.FIRST_COMPLETED)
            asking.cancel()
            dying.cancel()
        if self._process.returncode is not None:
            raise EngineFailed(f"vLLM ended before it took requests (exit code {self._process.returncode})")

    async def exited(self) -> int:
        """Return when it has ended, with its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once; from any thread."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            log.warning("vllm_killed", pid=self._process.pid, after_seconds=STOP_SECONDS)
            self.kill()
            await self._process.wait()


async def _until_healthy(client: VllmClient) -> None:
    asking = AsyncRetrying(retry=retry_if_result(lambda healthy: not healthy), wait=wait_fixed(ASK_EVERY))
    await asking(client.healthy)
