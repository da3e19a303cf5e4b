"""Child processes that send a run's metrics and spans to services, so that no service can delay or end the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from trinity_mq.config import Config
from trinity_mq.targets.run_folder import RunFolder

FINISH_SECONDS = 60.0
"""Seconds that the process may take to send the remaining metrics at the end of a run."""


class TrackerProcess:
    """The ``trinity-mq track --follow`` processes of a run: a process for ``monitor.trackers`` and a process for
    ``monitor.otlp``. Without these settings no process is started.

    Args:
        config: The run's configuration.
        folder: The run's folder.
        tell: Receives lines for the user.
    """

    def __init__(self, config: Config, folder: RunFolder, tell: Callable[[str], None]) -> None:
        self._senders: list[_Sender] = []
        if kinds := [tracker.kind for tracker in config.monitor.trackers]:
            self._senders.append(_Sender("metrics", kinds, ", ".join(kinds), FINISH_SECONDS, folder, tell))
        if (otlp := config.monitor.otlp) is not None:
            self._senders.append(_Sender("spans", ["otlp"], otlp.endpoint, otlp.flush_timeout, folder, tell))

    async def start(self) -> None:
        """Start the processes."""
        for sender in self._senders:
            await sender.start()

    async def end(self) -> None:
        """Let the processes send the rest, and end them. Report the output file of a process that fails."""
        async with asyncio.TaskGroup() as group:
            for sender in self._senders:
                group.create_task(sender.end())

    def kill(self) -> None:
        """Kill the processes. ``trinity-mq track`` can send the unsent data later."""
        for sender in self._senders:
            sender.kill()


class _Sender:
    """One process that sends ``what`` to the services ``kinds``. ``where`` names the services in messages."""

    def __init__(
        self,
        what: str,
        kinds: Sequence[str],
        where: str,
        finish_seconds: float,
        folder: RunFolder,
        tell: Callable[[str], None],
    ) -> None:
        self._data_kind, self._kinds, self._destination, self._finish_seconds = what, kinds, where, finish_seconds
        self._folder, self._report = folder, tell
        self._output = folder.logs / ("track.out" if what == "metrics" else f"track-{what}.out")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process."""
        service_arguments = [word for kind in self._kinds for word in ("--to", kind)]
        arguments = [
            "-m",
            "trinity_mq.cli.main",
            "track",
            str(self._folder.config_file),
            *service_arguments,
            "--follow",
        ]
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    async def end(self) -> None:
        """Let the process send the rest, and end it. Report its output file if it fails."""
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
            outcome = f"did not end within {self._finish_seconds:g} s" if code is None else f"ended with {code}"
            self._report(
                f"{self._data_kind} were not all sent to {self._destination}: the process {outcome}, see "
                f"{self._output}; `trinity-mq track {self._folder.path}` sends the rest"
            )

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
