"""The process beside a run that sends its metrics to services, so that none of them holds up or ends the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.config import Config

FINISH_SECONDS = 60.0
"""How long the process may send what is left at the end of a run."""


class TrackerProcess:
    """``trinity-mq track --follow`` of a run with ``monitor.trackers``; without any, nothing.

    Args:
        config: The run's.
        folder: The run's.
        tell: Takes lines for a person.
    """

    def __init__(self, config: Config, folder: RunFolder, tell: Callable[[str], None]) -> None:
        self._kinds = ", ".join(one.kind for one in config.monitor.trackers)
        self._folder, self._tell = folder, tell
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        if not self._kinds:
            return
        words = ["-m", "trinity_mq.cli.main", "track", str(self._folder.config_file), "--follow"]
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        with (self._folder.logs / "track.out").open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )

    async def end(self) -> None:
        """Have it send what is left, and end it; say where its output is if that did not work."""
        if (process := self._process) is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                code = await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
            code = None
        self._process = None
        if code != 0:
            what = f"did not end within {FINISH_SECONDS:g} s" if code is None else f"ended with {code}"
            output = self._folder.logs / "track.out"
            self._tell(
                f"metrics were not all sent to {self._kinds}: the process {what}, see {output}; "
                f"`trinity-mq track {self._folder.path}` sends the rest"
            )

    def kill(self) -> None:
        """End it at once; what it has not sent is sent by ``trinity-mq track``."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
