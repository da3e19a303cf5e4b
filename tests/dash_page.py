"""``trinity-mq dash`` as a process, for tests that look at its page."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

LOOK_AGAIN = 0.2


class DashProcess:
    """The command, on a free port.

    Args:
        target: Run folder or YAML file.
        words: Further arguments.
    """

    def __init__(self, target: Path, *words: str) -> None:
        self._command = [sys.executable, "-m", "trinity_mq.cli.main", "dash", str(target), "--port", "0", *words]
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        """Address of the page, with its key where it has one."""

    async def __aenter__(self) -> Self:
        """Start it, and wait for the line with its address."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = (await self._process.stdout.readline()).decode()
        self.url = line.partition(": ")[2].strip()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it as Ctrl-C does."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        async with asyncio.timeout(20):
            await self._process.wait()

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the JSON of a path below the page."""
        base = self.url.partition("?")[0]
        async with aiohttp.ClientSession() as http, http.get(base + path, params=query) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def until(self, wanted: Sequence[str], seconds: float) -> dict[str, Any]:
        """Return the state once each of the named values of it is true.

        Raises:
            TimeoutError: They are not within ``seconds``.
        """
        async with asyncio.timeout(seconds):
            while True:
                state = await self.get("api/state")
                if all(state.get(name) for name in wanted):
                    return state
                await asyncio.sleep(LOOK_AGAIN)
