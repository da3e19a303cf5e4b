"""A run that ``trinity-mq chaos`` starts: its broker, a proxy that can cut connections, and ``trinity-mq run``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trinity_mq.bus.addresses import URL_VARIABLE, each
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.targets.local import MARK_VARIABLE
from trinity_mq.runtime.processes.chaos_points import POINTS_VARIABLE
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.testing.tcp_proxy import FaultProxy

RESTARTS = ("supervisor.max_restarts=100000", "supervisor.restart_window=5")
"""Settings of a run that is started for faults. By default its supervisor would give up after so many restarts, and
wait longer before each restart."""
OUTPUT_FILE = "chaos-run.out"
END_SECONDS = 120.0
"""Seconds that a run may take to end after a request."""


@dataclass
class Launched:
    """A run started by the trial."""

    process: asyncio.subprocess.Process
    url: str
    """URL of the broker itself, not of the proxy."""
    mark: str
    proxy: FaultProxy | None
    is_private: bool
    """True if the broker is a private node started by this process."""

    @property
    def code(self) -> int | None:
        """Exit code of ``trinity-mq run``; None while it runs."""
        return self.process.returncode

    async def stop(self) -> None:
        """End the run: drain it, and kill it if draining takes too long."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def settings(overrides: Sequence[str]) -> list[str]:
    """Return the settings of the run: the command line's overrides, and defaults for the trial if they are not
    overridden.
    """
    overridden = {word.partition("=")[0] for word in overrides}
    defaults = [word for word in RESTARTS if word.partition("=")[0] not in overridden]
    return [*overrides, *defaults, "broker.url=null", "broker.url_file=null"]


@contextlib.asynccontextmanager
async def launch_run(
    config: Config, words: Sequence[str], url: str | None, points: Path, tell: Callable[[str], None]
) -> AsyncIterator[Launched]:
    """Start a run, and end it on exit from the context.

    Args:
        config: The run's configuration, including :func:`settings`.
        words: Arguments of ``trinity-mq run``.
        url: URL of the broker. None: start a private node in the run's folder.
        points: Folder for arming points inside its agents.
        tell: Called with a line of text for a person.

    Raises:
        CommandError: The run is already running, or has finished.
        NodeError: The broker cannot be started.
    """
    folder = RunFolder(config)
    if (holder := folder.holder()) is not None:
        raise CommandError(f"run {config.name!r} is already running (process {holder}): --attach {folder.path}")
    if folder.finished:
        raise CommandError(f"run {config.name!r} has finished; give it another name (name=...), or --fresh")
    folder.logs.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        is_private = url is None
        if url is None:
            url = await stack.enter_async_context(private_broker(folder.broker, config.supervisor, tell))
        proxy = None
        if len(each(url)) == 1 and urlsplit(url).scheme == "amqp":
            proxy = await stack.enter_async_context(FaultProxy(url))
        mark = secrets.token_hex(8)
        output = stack.enter_context((folder.logs / OUTPUT_FILE).open("ab"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trinity_mq.cli.main", "run", *words, "--plain", "--attached",
            stdin=subprocess.PIPE,  # the run drains when this process ends, whatever the cause
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                MARK_VARIABLE: mark,
                POINTS_VARIABLE: str(points.absolute()),
                URL_VARIABLE: url if proxy is None else proxy.url,
            },
            start_new_session=True,  # Ctrl-C must reach only this process
        )  # fmt: skip
        run = Launched(process, url, mark, proxy, is_private)
        tell(f"run {config.name!r} in {folder.path}, its output in {folder.logs / OUTPUT_FILE}")
        try:
            yield run
        finally:
            await run.stop()
