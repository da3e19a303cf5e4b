"""Runs a private broker inside a block of a run or a command, or in a separate process that outlives the command."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from trinity_mq.config import SupervisorConfig
from trinity_mq.errors import CommandError
from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.choose import local_broker
from trinity_mq.local_broker.node import NodeError
from trinity_mq.runtime.process import disk_full_message, wait_exit
from trinity_mq.targets.run_folder import LockedFolder

STOP_SECONDS = 60.0
READY_FD = "--ready-fd"


@contextlib.asynccontextmanager
async def private_broker(folder: Path, config: SupervisorConfig, report: Callable[[str], None]) -> AsyncIterator[str]:
    """Run a private broker inside the block, and yield its URL. If it dies, it is restarted with the same data and
    port. After the start, the errors of the block and of the broker are raised in an ExceptionGroup.

    Args:
        folder: Folder with the broker's data, ports and password.
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


async def serve_broker(home: LockedFolder, ready_fd: int | None) -> int:
    """Run a private broker until SIGINT or SIGTERM, then return exit code 0. Its URL is stored in the folder ``home``,
    and is written to the file descriptor ``ready_fd`` unless that is None.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with private_broker(home.path, SupervisorConfig(), lambda text: print(text, flush=True)) as url:
        home.save_broker_url(url)
        if ready_fd is not None:
            os.write(ready_fd, url.encode())
            os.close(ready_fd)
        print(f"serving {url}", flush=True)
        await stopped.wait()
        home.remove_broker_url()
    return 0


def spawn(home: LockedFolder) -> str:
    """Start a broker in a process of its own and return its URL.

    Raises:
        CommandError: The broker did not start.
    """
    home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = home.path / "serve.out"
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", "trinity_mq.cli.main", "broker", "serve", str(home.path), READY_FD, str(write_end)]
    with output.open("wb") as file, os.fdopen(read_end, "rb") as pipe:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, pass_fds=(write_end,), start_new_session=True
        )
        os.close(write_end)
        url = pipe.read().decode()  # reads until the pipe closes: the URL, or nothing if the broker failed
    if not url:
        lines = output.read_text(errors="replace").strip().splitlines()
        reasons = [line for line in lines if line.startswith("trinity-mq")] or lines[-1:] or [f"see {output}"]
        raise CommandError(f"the broker did not start: {reasons[0]}")
    return url


async def wait_for_exit(pid: int) -> None:
    """Wait until a process has ended.

    Raises:
        CommandError: The process has not ended within ``STOP_SECONDS``.
    """
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await wait_exit(pid)
    except TimeoutError:
        raise CommandError(f"process {pid} did not stop within {STOP_SECONDS:g} s; see its output") from None


def broker_folder(path: str | Path) -> LockedFolder:
    """Return the folder of a broker that outlives the command, with its lock and URL files."""
    return LockedFolder(Path(path), "serve.lock", "serve.url", mode=0o700)
