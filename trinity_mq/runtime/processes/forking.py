"""Starts processes by forking a process that has imported everything: in milliseconds, and with shared memory.

``trinity-mq run`` starts a fork server before anything else. The server's address is in the environment of the agents,
so that an explorer can fork its engines too. Without a server (on a system other than Linux, for agents started one by
one, or after the server has died) processes are started with their command line and behave the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil
import structlog

from trinity_mq.runtime.processes.fork_server import GO, MOST_BYTES, ForkRequest
from trinity_mq.runtime.processes.fork_server_process import ForkServer

log = structlog.get_logger(__name__)

ADDRESS_VARIABLE = "TRINITY_MQ_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
IMPORT_SECONDS = 60.0
"""Maximum seconds for a server to answer, including its imports."""


class NotForkedError(RuntimeError):
    """The server is gone, or refused: start the process with its command line."""


class Process(Protocol):
    """The common interface of :class:`asyncio.subprocess.Process` and :class:`ForkedProcess`."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """Exit code, below 0 for a signal; None while the process runs."""

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""

    def send_signal(self, signal: int, /) -> None:
        """Send a signal; without effect after the process has ended."""


class ForkedProcess:
    """A child that this process has adopted: forked by a fork server for this process, or left by an ended child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._reap)

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Send a signal; without effect after the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # killed before we became its parent
            self.returncode = -signal.SIGKILL
        self._ended.set()


Starter = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Awaitable[Process]]
"""Starts a command line with an environment and a file for its output, in a session of its own.

Raises:
    OSError: The process cannot be started."""


async def start_command(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
    """Start a program with its command line. This function is a :data:`Starter`."""
    return await asyncio.create_subprocess_exec(
        *command,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


def start_forked(server: ForkServer) -> Starter:
    """Return a starter that forks Python modules through ``server``. It starts other programs, and modules that cannot
    be forked, with their command line.
    """

    async def start(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
        if is_forkable(command):
            try:
                return ForkedProcess(await fork(server.path, command, env=env, output=output.fileno(), adopted=True))
            except NotForkedError as error:
                log.warning("process_not_forked", command=" ".join(command), reason=str(error))
        return await start_command(command, env, output)

    return start


def adopted_orphans(session: int) -> list[ForkedProcess]:
    """Return our children in a session whose leader has ended. As their adoptive parent we have to reap them."""
    orphans = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) == session:
                orphans.append(ForkedProcess(child.pid))
    return orphans


async def fork(
    address: str | Path,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: int,
    fds: Sequence[int] = (),
    adopted: bool,
) -> int:
    """Let the server at ``address`` start ``python -m module words...`` in a session of its own; return its process id.

    Args:
        address: The server's socket.
        command: ``sys.executable``, ``-m``, the module and its command line.
        env: The complete environment of the process.
        output: File descriptor for stdout and stderr.
        fds: Further descriptors, which get the same numbers in the process.
        adopted: Whether the process that started the server becomes the parent. Otherwise the server is the parent, and
            the exit code is unknown.

    Raises:
        NotForkedError: The process was not started.
    """
    if not is_forkable(command):
        raise NotForkedError(f"the command is {' '.join(command)!r}, wanted {sys.executable!r} -m MODULE")
    request = ForkRequest(
        module=command[2],
        words=command[3:],
        env=dict(env),
        cwd=os.getcwd(),
        fds=[1, 2, *fds],
        adopted=adopted,
    )
    return await asyncio.to_thread(_ask, str(address), request.encode(), [output, output, *fds])


def is_forkable(command: Sequence[str]) -> bool:
    """Return whether a fork server can start ``command``."""
    return len(command) > 2 and list(command[:2]) == [sys.executable, "-m"]


def _ask(address: str, packet: bytes, fds: Sequence[int]) -> int:
    if len(packet) > MOST_BYTES:
        raise NotForkedError(f"the request has {len(packet)} bytes, {MOST_BYTES} at most: a large environment")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(IMPORT_SECONDS)
            connection.connect(address)
            socket.send_fds(connection, [packet], fds)
            answer = json.loads(connection.recv(MOST_BYTES) or b"{}")
            if "pid" in answer:
                connection.send(GO)
    except (OSError, ValueError) as error:
        raise NotForkedError(f"the fork server does not answer: {error}") from error
    if "pid" not in answer:
        raise NotForkedError(answer.get("error", "the fork server ended before it answered"))
    return int(answer["pid"])
