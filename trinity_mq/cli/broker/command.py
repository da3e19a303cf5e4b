"""A broker of our own: kept alive during a run, and ``trinity-mq broker`` for one that outlives runs."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from trinity_mq.cli.errors import CommandError
from trinity_mq.config import SupervisorConfig
from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.choose import local_broker
from trinity_mq.local_broker.node import NodeError
from trinity_mq.runtime.process import wait_exit, write_atomic

STOP_SECONDS = 60.0
LIVES_SECONDS = 1.0
"""A broker that lives answers within this."""
READY_FD = "--ready-fd"


class OwnBroker:
    """A private broker that is started again, on the same data and port, when it dies.

    Args:
        folder: Its data, ports and password.
        config: How many deaths within what time are too many.
        tell: Called with a line for a person.
    """

    def __init__(self, folder: Path, config: SupervisorConfig, tell: Callable[[str], None]) -> None:
        self._folder, self._config, self._tell = folder, config, tell

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Have it run, and give its URL; stop it cleanly at the end.

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
        url, deaths, loop = node.url, collections.deque[float](), asyncio.get_running_loop()
        while True:
            if node.pid is not None:
                await wait_exit(node.pid)
            if await _answers(node):
                return  # in Docker on a machine whose processes we cannot see: its own restart policy is all there is
            deaths.append(loop.time())
            while deaths[0] <= loop.time() - self._config.restart_window:
                deaths.popleft()
            if len(deaths) > self._config.max_restarts:
                raise NodeError(f"the broker died {len(deaths)} times within {self._config.restart_window:g} s")
            self._tell("the broker died and is started again")
            await node.kill()  # clears away what is left of it
            await node.launch()
            if node.url != url:
                raise NodeError("the broker died and another program took its port: start the run again")


async def _answers(node: LocalNode) -> bool:
    try:
        await node.wait_ready(LIVES_SECONDS)
    except NodeError:
        return False
    return True


def serve(arguments: argparse.Namespace) -> int:
    """Run a broker in the foreground until interrupted."""
    home = BrokerHome(Path(arguments.folder))
    with home.locked():
        return asyncio.run(_serve(home, arguments.ready_fd))


async def _serve(home: BrokerHome, ready_fd: int | None) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with OwnBroker(home.folder, SupervisorConfig(), lambda text: print(text, flush=True)).running() as url:
        home.note(url)
        if ready_fd is not None:
            os.write(ready_fd, url.encode())
            os.close(ready_fd)
        print(f"serving {url}", flush=True)
        await stopped.wait()
        home.forget()
    return 0


def start(arguments: argparse.Namespace) -> int:
    """Start a broker in the background and print its URL, also when it runs already."""
    home = BrokerHome(Path(arguments.folder))
    if (url := home.url()) is None:
        url = _spawn(home)
    print(url)
    return 0


def _spawn(home: BrokerHome) -> str:
    home.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = home.folder / "serve.out"
    ready, told = os.pipe()
    argv = [sys.executable, "-m", "trinity_mq.cli.main", "broker", "serve", str(home.folder), READY_FD, str(told)]
    with output.open("wb") as file, os.fdopen(ready, "rb") as pipe:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, pass_fds=(told,), start_new_session=True
        )
        os.close(told)
        url = pipe.read().decode()  # to its end: the URL, or nothing from one that has failed
    if not url:
        lines = output.read_text(errors="replace").strip().splitlines()
        told_why = [line for line in lines if line.startswith("trinity-mq")] or lines[-1:] or [f"see {output}"]
        raise CommandError(f"the broker did not start: {told_why[0]}")
    return url


def stop(arguments: argparse.Namespace) -> int:
    """Stop the broker of a folder and wait until its data is on disk."""
    home = BrokerHome(Path(arguments.folder))
    pid = home.holder()
    if pid is None:
        print(f"no broker runs in {home.folder}")
        return 0
    os.kill(pid, signal.SIGTERM)
    asyncio.run(_gone(pid))
    print(f"stopped the broker in {home.folder}")
    return 0


async def _gone(pid: int) -> None:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await wait_exit(pid)
    except TimeoutError:
        raise CommandError(f"process {pid} did not stop within {STOP_SECONDS:g} s; see its output") from None


def status(arguments: argparse.Namespace) -> int:
    """Print the URL of a folder's broker; 1 when none runs."""
    home = BrokerHome(Path(arguments.folder))
    url = home.url()
    print(f"runs as process {home.holder()}: {url}" if url else f"no broker runs in {home.folder}")
    return 0 if url else 1


class BrokerHome:
    """A folder with a broker that outlives the command: who serves it, and its URL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock, self._url = self.folder / "serve.lock", self.folder / "serve.url"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Serve it from this process.

        Raises:
            CommandError: Another process does.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        except BlockingIOError:
            raise CommandError(f"process {self.holder()} already serves a broker in {self.folder}") from None
        finally:
            os.close(fd)

    def holder(self) -> int | None:
        """Return the process that serves it, None when nobody does."""
        try:
            fd = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(fd, 32, 0) or b"0") or None
        finally:
            os.close(fd)
        return None

    def url(self) -> str | None:
        """Return its URL while it is served."""
        return self._url.read_text() if self.holder() is not None and self._url.exists() else None

    def note(self, url: str) -> None:
        """Write the URL down, readable by the owner only."""
        write_atomic(self._url, url.encode(), mode=0o600)

    def forget(self) -> None:
        """The URL leads nowhere any more."""
        self._url.unlink(missing_ok=True)
