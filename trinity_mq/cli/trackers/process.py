"""The processes beside a run that send its metrics and its spans to services, so that none holds up or ends the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.config import Config

FINISH_SECONDS = 60.0
"""Seconds that the process may take to send what is left of the metrics at the end of a run."""


class TrackerProcess:
    """``trinity-mq track --follow`` of a run: one for its ``monitor.trackers``, one for its ``monitor.otlp``; without
    any, nothing.

    Args:
        config: The run's.
        folder: The run's.
        tell: Takes lines for a person.
    """

    def __init__(self, config: Config, folder: RunFolder, tell: Callable[[str], None]) -> None:
        self._senders: list[_Sender] = []
        if kinds := [one.kind for one in config.monitor.trackers]:
            self._senders.append(_Sender("metrics", kinds, ", ".join(kinds), FINISH_SECONDS, folder, tell))
        if (otlp := config.monitor.otlp) is not None:
            self._senders.append(_Sender("spans", ["otlp"], otlp.endpoint, otlp.flush_timeout, folder, tell))

    async def start(self) -> None:
        """Start them."""
        for sender in self._senders:
            await sender.start()

    async def end(self) -> None:
        """Have them send what is left, and end them; say where the output is of one for which that did not work."""
        async with asyncio.TaskGroup() as group:
            for sender in self._senders:
                group.create_task(sender.end())

    def kill(self) -> None:
        """End them at once; what they have not sent is sent by ``trinity-mq track``."""
        for sender in self._senders:
            sender.kill()


class _Sender:
    """One process: sends ``what`` to ``kinds`` of services, known to a person as ``where``."""

    def __init__(
        self,
        what: str,
        kinds: Sequence[str],
        where: str,
        finish_seconds: float,
        folder: RunFolder,
        tell: Callable[[str], None],
    ) -> None:
        self._what, self._kinds, self._where, self._finish_seconds = what, kinds, where, finish_seconds
        self._folder, self._tell = folder, tell
        self._output = folder.logs / ("track.out" if what == "metrics" else f"track-{what}.out")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        to = [word for kind in self._kinds for word in ("--to", kind)]
        words = ["-m", "trinity_mq.cli.main", "track", str(self._folder.config_file), *to, "--follow"]
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as out:
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
            async with asyncio.timeout(self._finish_seconds):
                code = await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
            code = None
        self._process = None
        if code != 0:
            how = f"did not end within {self._finish_seconds:g} s" if code is None else f"ended with {code}"
            self._tell(
                f"{self._what} were not all sent to {self._where}: the process {how}, see {self._output}; "
                f"`trinity-mq track {self._folder.path}` sends the rest"
            )

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
