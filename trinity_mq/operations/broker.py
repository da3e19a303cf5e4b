"""Starts and stops a private broker that outlives the command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from trinity_mq.config import SupervisorConfig
from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import wait_exit
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.run_folder import LockedFolder

STOP_SECONDS = 60.0
READY_FD = "--ready-fd"


async def serve_broker(home: LockedFolder, ready_fd: int | None) -> int:
    """Run a private broker until SIGINT or SIGTERM, then return exit code 0. Its URL is written to ``ready_fd``."""
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
