"""The process that agents are forked from: it imports what they need once, and then serves forks. Linux only.

Started by :class:`~trinity_mq.runtime.processes.forking.ForkServer`, as ``python -m`` with a listening socket and the
modules to import. Each connection asks for one process, see :class:`ForkRequest`, with its file descriptors beside it.

It never has a second thread: a fork would leave that one's locks held for ever in the child. Where an import has
started one, requests are refused, and their processes are started anew.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

GO = b"go"
"""Answers a new process's id: whoever asked still wants it."""
ANSWER_SECONDS = 10.0
"""Seconds that a connected client may take to go on."""
MOST_FDS = 8
MOST_BYTES = 1 << 17
"""Upper bound of a request, which is one packet."""
ADOPTION_INTERVAL = 0.0005
"""Seconds between two looks at whether the process that asked has become our parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A process that does ``python -m module words...`` in a session of its own."""

    module: str
    words: Sequence[str]
    env: dict[str, str]
    """Its whole environment."""
    cwd: str
    fds: Sequence[int]
    """The numbers that it has the descriptors under that come with the request."""
    adopted: bool
    """Its parent is the process above the server that adopts orphans; else the server is, and nobody asks how it ended.
    """

    def encode(self) -> bytes:
        """Return it as a packet."""
        return json.dumps(asdict(self)).encode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Import the modules, then serve until the process that started us ends. Returns in each forked process, too."""
    parser = argparse.ArgumentParser(prog="python -m trinity_mq.runtime.processes.fork_server", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of a listening socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE[=WORD]",
        help="what to import; what cannot be imported is left to who needs it. Processes whose first word is WORD are "
        "forked once it is imported, all others when everything is",
    )
    options = parser.parse_args(arguments)
    from trinity_mq.runtime.process import die_with_parent

    getproctitle()  # finds its place beside the environment, which is another one later
    listener = socket.socket(fileno=options.socket)
    _remove_when_ended(Path(listener.getsockname()))
    die_with_parent(options.parent, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries what nobody waits for
    request, fds = import_and_serve(listener, options.modules)
    place(fds, request.fds)
    become(request)
    sys.modules.pop(request.module, None)  # else runpy warns; what it imports is there
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            end_process(end.code or 0)
        raise  # the interpreter prints it
    end_process(0)


def _remove_when_ended(path: Path) -> None:
    """Have SIGTERM, which also says that the process that started us has ended, remove the socket and its folder."""
    server = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == server:  # else a fork that is not yet a process of its own
            shutil.rmtree(path.parent, ignore_errors=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that came over a connection."""

    connection: socket.socket
    packet: bytes
    fds: Sequence[int]

    @property
    def word(self) -> str | None:
        """The first word of the command line, None where there is none."""
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(self.packet)["words"][0])
        return None

    def close(self) -> None:
        """Give up the connection and the descriptors that came with the request."""
        self.connection.close()
        for fd in self.fds:
            os.close(fd)


def import_and_serve(listener: socket.socket, modules: Sequence[str]) -> tuple[ForkRequest, Sequence[int]]:
    """Import modules, each a ``MODULE[=WORD]``, and fork a process for each request, as soon as what its first word
    stands for is imported; return the request in that process only, with the descriptors that came with it.
    """
    waiting: list[_Asked] = []
    words: set[str | None] = set()
    gc.disable()  # most of what imports make stays: to look through it again and again takes a fifth of their time
    for name in modules:
        module, _, word = name.partition("=")
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        gc.collect()  # looks at what the module brought only
        gc.freeze()  # pages that the collector does not touch stay shared
        if word:
            words.add(word)
        waiting += _arrived(listener)
        if (found := _serve_waiting(listener, waiting, words)) is not None:
            return found
    while True:
        if (found := _serve_waiting(listener, waiting, None)) is not None:
            return found
        if (asked := _receive(listener)) is not None:
            waiting.append(asked)


def _arrived(listener: socket.socket) -> list[_Asked]:
    """Return the requests that have come, without waiting."""
    found = []
    while select.select([listener], [], [], 0)[0]:
        if (asked := _receive(listener)) is not None:
            found.append(asked)
    return found


def _receive(listener: socket.socket) -> _Asked | None:
    connection, _ = listener.accept()
    connection.settimeout(ANSWER_SECONDS)
    try:
        packet, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_FDS)
    except OSError:  # nothing came
        packet, fds = b"", []
    asked = _Asked(connection, packet, fds)
    if packet:
        return asked
    asked.close()
    return None


def _serve_waiting(
    listener: socket.socket, waiting: list[_Asked], words: Collection[str | None] | None
) -> tuple[ForkRequest, Sequence[int]] | None:
    """Fork the waiting requests with one of ``words``, None for all of them; return one in its new process only."""
    for asked in [one for one in waiting if words is None or one.word in words]:
        waiting.remove(asked)
        request = _forked(asked.connection, asked.packet)
        if request is None:
            asked.close()
            continue
        asked.connection.close()
        for other in waiting:
            other.close()
        listener.close()
        return request, asked.fds
    return None


def _forked(connection: socket.socket, packet: bytes) -> ForkRequest | None:
    """Fork as a packet says and answer it; return the request in the new process."""
    try:
        request = ForkRequest(**json.loads(packet))
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"the fork server has {threads} threads, wanted 1: an import has started others")
        pid = os.fork()
    except Exception as error:
        _answer(connection, error=f"{type(error).__name__}: {error}")
        return None
    if pid:
        return None
    if request.adopted:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(ADOPTION_INTERVAL)
    _answer(connection, pid=os.getpid())
    try:
        wanted = connection.recv(len(GO)) == GO
    except OSError:
        wanted = False
    if not wanted:  # who asked has given up, and has started another one
        os._exit(1)
    return request


def _answer(connection: socket.socket, **said: Any) -> None:
    with contextlib.suppress(OSError):  # who asked has gone
        connection.send(json.dumps(said).encode())


def place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open file descriptors other numbers, inheritable; whatever had these numbers is closed."""
    beyond = max([*fds, *numbers, 2]) + 1
    for spare, fd in enumerate(fds, beyond):
        os.dup2(fd, spare, inheritable=False)
        os.close(fd)
    for spare, number in enumerate(numbers, beyond):
        os.dup2(spare, number)
        os.close(spare)


def become(request: ForkRequest) -> None:
    """Make this process what it would be had it been started with a command line."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    sys.argv = [request.module, *request.words]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    setproctitle(" ".join(sys.orig_argv))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    gc.enable()
    if (threads := request.env.get("OMP_NUM_THREADS")) and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))  # the variable was read when it was imported
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # each process its own, as when it is started
    sys.path[0] = str(Path.cwd())


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter would, but let the kernel free its objects.

    The interpreter visits each of them, and so gets a copy of every page that is shared with the fork server: with all
    agents of a run ending at the same time, half as much memory again as the run took, and a second of processor time.
    """
    # as the interpreter does: first it waits for threads and executors
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or whoever read it has gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
