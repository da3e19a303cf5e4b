"""Child processes that answer requests over pipes, and limit their own resources.

The math judge and the reader of legacy bodies pass hostile input to code that may hang, crash or exhaust memory. In a
child process the kernel enforces the limits. pebble does not fit: it limits wall time, which turns right answers into
wrong answers on a busy machine, and it unpickles the output of its workers.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

_READY = b"ready"
_EXIT_SECONDS = 0.2
"""Seconds for a child to end by itself after its input is closed."""


class ChildEndedError(Exception):
    """The child process ended instead of answering a request."""

    def __init__(self, exitcode: int) -> None:
        super().__init__(f"the child process ended with code {exitcode}")
        self.exitcode = exitcode
        """Exit code as in ``subprocess.Popen``: a negative number is a signal."""


class ChildTimeoutError(RuntimeError):
    """The child process did not answer in time, for a reason outside of the request; a retry may help."""


class ChildNotStartedError(RuntimeError):
    """The child process ended before it was ready."""


class ChildServer:
    """A child process that answers one request at a time. It starts at the first use, and again after it has ended.

    Threads may share it. A forked process starts its own child.

    Args:
        file: Python file to run; it calls :func:`serve`.
        arguments: The command line of the child.
        silence: Seconds without an answer, or without the start message, after which the child is killed.
    """

    def __init__(self, file: Path, *arguments: object, silence: float = 120.0) -> None:
        self._command = [sys.executable, "-P", str(file), *map(str, arguments)]
        self._silence = silence
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._inherited: list[subprocess.Popen[bytes] | None] = []
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before the first request and after a request that ended the child."""
        return self._child.pid if self._child else None

    def ask(self, request: bytes, max_answer: int = 1 << 20) -> bytes:
        """Return the child's answer to a request.

        Args:
            request: Passed to the child.
            max_answer: Maximum bytes of the answer; the child is killed for a longer answer.

        Raises:
            ChildEndedError: The child ended or its answer was too long; it starts again with the next request.
            ChildTimeoutError: The child did not answer in time, and was killed.
            ChildNotStartedError: The child cannot be started.
        """
        with self._lock:
            try:
                pipe = self._pipe or self._start()
                try:
                    pipe.send_bytes(request)
                    return pipe.recv_bytes(max_answer)
                except BlockingIOError:
                    raise self._timeout_error() from None
                except (EOFError, OSError):
                    raise ChildEndedError(self._end()) from None
            except BaseException:  # the answer to an interrupted request must not reach the next request
                self._end()
                raise

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _start(self) -> Connection:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._pipe, theirs = Pipe()
        limit = struct.pack("ll", int(self._silence), int(self._silence % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:  # both sockets share the options
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self._child = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        try:
            self._pipe.recv_bytes(len(_READY))
        except BlockingIOError:
            raise self._timeout_error() from None
        except (EOFError, OSError):
            raise ChildNotStartedError(f"the child process ended with code {self._end()} before it was ready") from None
        return self._pipe

    def _timeout_error(self) -> ChildTimeoutError:
        return ChildTimeoutError(f"no answer in {self._silence:g} s: the machine may be overloaded")

    def _end(self) -> int:
        """Close the pipe, and kill the child if it does not end by itself; return its exit code, 0 without a child."""
        child, self._child, pipe, self._pipe = self._child, None, self._pipe, None
        if pipe is not None:
            pipe.close()
        if child is None:
            return 0
        try:
            return child.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def _forget(self) -> None:
        """Leave child and lock to the process from which this process was forked."""
        self._inherited.append(self._child)  # kept, since a collected Popen warns if its process is running
        self._child = self._pipe = None
        self._lock = threading.Lock()


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer the requests of a :class:`ChildServer` until it closes the pipe. Runs in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    with Connection(os.dup(0)) as pipe:
        pipe.send_bytes(_READY)
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(answer(request))


def limit_memory(limit: int) -> None:
    """Allow this process to allocate at most ``limit`` bytes in addition to its current memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    soft = int(status["VmData"].split()[0]) * 1024 + limit
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))


def answer_in_fork(answer: Callable[[bytes], bytes], request: bytes, cpu_seconds: int, memory: int) -> bytes:
    """Return ``answer(request)``, computed in a fork of this process with limits that ends after the answer.

    Args:
        answer: Runs in the fork.
        request: Its argument.
        cpu_seconds: Maximum CPU seconds of the fork.
        memory: Bytes that the fork may allocate.

    Raises:
        ChildEndedError: The fork ended without an answer.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
            limit_memory(memory)
            body = answer(request)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(body)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reply = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise ChildEndedError(status)
    return reply
