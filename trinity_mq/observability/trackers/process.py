"""Child processes that send a run's metrics and spans to services, so that no service can delay or end the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class _Sender:
    """One process that sends data to services."""

    data: str
    """The sent data, in messages: ``metrics`` or ``spans``."""
    kinds: Sequence[str]
    """The services, as values of ``--to``."""
    destination: str
    """Names of the services in messages."""
    finish_seconds: float
    folder: RunFolder
    report: Callable[[str], None]
    process: asyncio.subprocess.Process | None = None

    @property
    def output(self) -> Path:
        """File with the output of the process."""
        return self.folder.logs / ("track.out" if self.data == "metrics" else f"track-{self.data}.out")

    async def start(self) -> None:
        """Start the process."""
        service_arguments = [word for kind in self.kinds for word in ("--to", kind)]
        arguments = ["track", str(self.folder.config_file), *service_arguments, "--follow"]
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trinity_mq.cli.main", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    async def end(self) -> None:
        """Let the process send the rest, and end it. Report its output file if it fails."""
        if (process := self.process) is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(self.finish_seconds):
                code = await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
            code = None
        self.process = None
        if code != 0:
            outcome = f"did not end within {self.finish_seconds:g} s" if code is None else f"ended with {code}"
            self.report(
                f"{self.data} were not all sent to {self.destination}: the process {outcome}, see "
                f"{self.output}; `trinity-mq track {self.folder.path}` sends the rest"
            )

    def kill(self) -> None:
        """Kill the process."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
