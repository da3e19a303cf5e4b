"""The process from which agents are forked: it imports their modules once, and then serves forks. Linux only.

:class:`~trinity_mq.runtime.processes.forking.ForkServer` starts it as ``python -m`` with a listening socket and the
modules to import. Each connection requests one process, see :class:`ForkRequest`, together with its file descriptors.

It never has a second thread, since a fork would leave the locks of that thread held for ever in the child. If an import
has started a thread, requests are refused, and their processes are started with their command line.
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
"""Reply to a new process's id: the client still wants the process."""
ANSWER_SECONDS = 10.0
"""Maximum seconds to wait for a connected client."""
MOST_FDS = 8
MOST_BYTES = 1 << 17
"""Maximum bytes of a request, which is one packet."""
ADOPTION_INTERVAL = 0.0005
"""Seconds between two checks for the adoption of this process by its new parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A request for a process that runs ``python -m module words...`` in its own session."""

    module: str
    words: Sequence[str]
    env: dict[str, str]
    """The complete environment of the process."""
    cwd: str
    fds: Sequence[int]
    """Descriptor numbers in the process for the file descriptors sent with the request."""
    adopted: bool
    """Whether the process that started the server becomes the parent, as it adopts orphans. Otherwise the parent is the
    server, and no exit status is reported."""

    def encode(self) -> bytes:
        """Return the request as a packet."""
        return json.dumps(asdict(self)).encode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Import the modules, and serve until the process that started this server ends, which ends this process too. In a
    forked process run the requested module, and end.
    """
    parser = argparse.ArgumentParser(prog="python -m trinity_mq.runtime.processes.fork_server", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of a listening socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the process that started this server")
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE[=WORD]",
        help="modules to import; a module that cannot be imported is left to the process that needs it. Processes "
        "whose first word is WORD are forked once MODULE is imported, all others once all modules are imported",
    )
    options = parser.parse_args(arguments)
    from trinity_mq.runtime.process import die_with_parent

    getproctitle()  # finds the memory of the title next to the environment, before the environment is replaced
    listener = socket.socket(fileno=options.socket)
    _remove_on_sigterm(Path(listener.getsockname()))
    die_with_parent(options.parent, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children that no process waits for
    request, fds = import_and_serve(listener, options.modules)
    place(fds, request.fds)
    apply_request(request)
    sys.modules.pop(request.module, None)  # otherwise runpy warns; the imported dependencies stay
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            end_process(end.code or 0)
        raise  # the interpreter prints the message
    end_process(0)


def _remove_on_sigterm(path: Path) -> None:
    """Let SIGTERM remove the socket and its folder. The kernel also sends SIGTERM when the process that started us has
    ended.
    """
    server = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == server:  # otherwise a fork that has not changed its signal handlers yet
            shutil.rmtree(path.parent, ignore_errors=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """A request received over a connection."""

    connection: socket.socket
    packet: bytes
    fds: Sequence[int]

    @property
    def word(self) -> str | None:
        """The first word of the command line; None if the command line is empty or the packet is invalid."""
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(self.packet)["words"][0])
        return None

    def close(self) -> None:
        """Close the connection and the descriptors that came with the request."""
        self.connection.close()
        for fd in self.fds:
            os.close(fd)


def import_and_serve(listener: socket.socket, modules: Sequence[str]) -> tuple[ForkRequest, Sequence[int]]:
    """Import modules, each given as ``MODULE[=WORD]``, and fork a process for each request: once the module with the
    request's first word is imported, or once all modules are imported if none has this word. Return only in the forked
    process, with the request and its descriptors.
    """
    waiting: list[_PendingRequest] = []
    words: set[str | None] = set()
    gc.disable()  # most objects of imports are permanent: collecting them repeatedly takes a fifth of the import time
    for name in modules:
        module, _, word = name.partition("=")
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        gc.collect()  # fast: the objects of earlier imports are frozen
        gc.freeze()  # pages that the collector does not touch stay shared
        if word:
            words.add(word)
        waiting += _arrived_requests(listener)
        if (forked := _serve_waiting(listener, waiting, words)) is not None:
            return forked
    while True:
        if (forked := _serve_waiting(listener, waiting, None)) is not None:
            return forked
        if (pending := _receive(listener)) is not None:
            waiting.append(pending)


def _arrived_requests(listener: socket.socket) -> list[_PendingRequest]:
    """Return the requests that have arrived, without waiting."""
    pending_requests = []
    while select.select([listener], [], [], 0)[0]:
        if (pending := _receive(listener)) is not None:
            pending_requests.append(pending)
    return pending_requests


def _receive(listener: socket.socket) -> _PendingRequest | None:
    connection, _ = listener.accept()
    connection.settimeout(ANSWER_SECONDS)
    try:
        packet, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_FDS)
    except OSError:  # the client sent nothing
        packet, fds = b"", []
    pending = _PendingRequest(connection, packet, fds)
    if packet:
        return pending
    pending.close()
    return None


def _serve_waiting(
    listener: socket.socket, waiting: list[_PendingRequest], words: Collection[str | None] | None
) -> tuple[ForkRequest, Sequence[int]] | None:
    """Fork a process for each waiting request with one of ``words`` (None: all requests). Return only in a new process,
    with its request.
    """
    for pending in [candidate for candidate in waiting if words is None or candidate.word in words]:
        waiting.remove(pending)
        request = _forked(pending.connection, pending.packet)
        if request is None:
            pending.close()
            continue
        pending.connection.close()
        for unserved in waiting:
            unserved.close()
        listener.close()
        return request, pending.fds
    return None


def _forked(connection: socket.socket, packet: bytes) -> ForkRequest | None:
    """Fork as ``packet`` requests, and answer the request; return the request in the new process, None in the
    server.
    """
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
        intermediate = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == intermediate:
            time.sleep(ADOPTION_INTERVAL)
    _answer(connection, pid=os.getpid())
    try:
        confirmed = connection.recv(len(GO)) == GO
    except OSError:
        confirmed = False
    if not confirmed:  # the client gave up and started another process
        os._exit(1)
    return request


def _answer(connection: socket.socket, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        connection.send(json.dumps(fields).encode())


def place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open file descriptors other numbers and make them inheritable; close the descriptors that had these
    numbers.
    """
    first_spare = max([*fds, *numbers, 2]) + 1
    for spare, fd in enumerate(fds, first_spare):
        os.dup2(fd, spare, inheritable=False)
        os.close(fd)
    for spare, number in enumerate(numbers, first_spare):
        os.dup2(spare, number)
        os.close(spare)


def apply_request(request: ForkRequest) -> None:
    """Give this process the state that it would have after a start with a command line."""
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
        torch.set_num_threads(int(threads))  # torch read the variable at its import, before it was set
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # each process gets its own seed, as after a normal start
    sys.path[0] = str(Path.cwd())


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter would, but let the kernel free its objects.

    The interpreter visits every object, and so copies every page that is shared with the fork server. If all agents of
    a run end at the same time, that takes half as much memory again as the run, and a second of CPU time.
    """
    # the interpreter also first waits for threads and executors
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or the reader is gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
