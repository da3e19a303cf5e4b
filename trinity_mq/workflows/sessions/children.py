"""Programs that a workflow runs: one process per run, or a kept process that answers many requests.

A kept program reads a request from a line of its standard input: JSON with an ``id``. It writes the answer, JSON with
the same ``id``, to a line of its standard output. Answers may come in any order. When it is ready, it writes
``{"ready": true}``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from trinity_mq.workflows.errors import SandboxFailed

log = structlog.get_logger(__name__)

LONGEST_LINE = 1 << 26
"""Maximum bytes of one answer."""
TAIL = 10
"""Number of lines from the end of the standard error that are included in the reason of a failure."""
READY_SECONDS = 120.0
"""Seconds that a kept program has to become ready: its imports may take long."""
INSTALL = "install it, or correct the path in workflow_args (docs/harnesses.md installs harnesses)"
END_SECONDS = 5.0
"""Seconds that a program may still run after its input or its output was closed. Then it is killed."""
OWN_PREFIX = "TRINITY_MQ_"
"""Prefix of variables of the run itself, such as the broker's URL with its password. Programs do not get them."""
NEEDED = ("DOCKER_HOST", "HOME", "JAVA_HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
"""Variables of this process that an isolated program gets. They hold no secrets."""
NEEDED_PREFIXES = ("LC_", "PYTHON")


@dataclass(frozen=True, slots=True)
class Program:
    """A command with its environment variables and working directory."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Variables that override the variables of this process."""
    cwd: str | None = None
    is_isolated: bool = False
    """Give the program only the variables of ``NEEDED`` and ``NEEDED_PREFIXES`` of this process, so that it sees no
    keys. False: all variables but those that begin with ``OWN_PREFIX``.
    """

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables of the program."""

        def is_inherited(name: str) -> bool:
            if self.is_isolated:
                return name in NEEDED or name.startswith(NEEDED_PREFIXES)
            return not name.startswith(OWN_PREFIX)

        return {name: value for name, value in os.environ.items() if is_inherited(name)} | dict(self.env)

    @property
    def name(self) -> str:
        """The command in one line."""
        return " ".join(self.command)[:200]

    async def start(self, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        """Start the program in its own process session.

        Raises:
            SandboxFailed: The program cannot be started.
        """
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**self.environment, **(env or {})},
                cwd=self.cwd,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = missing_program(self.command[0], self.cwd) or str(error)
            raise SandboxFailed(f"{self.name} cannot be started: {reason}", kind="environment") from error


def missing_program(name: str, cwd: str | None = None, path: str | None = None) -> str:
    """Return a sentence if a program or its working directory is missing on this machine, with the next step. Empty:
    both exist.

    Args:
        name: First word of a command.
        cwd: Working directory of the program.
        path: Folders of programs, as in ``PATH``. None: the folders of this process.
    """
    if cwd is not None and not Path(cwd).is_dir():
        return f"there is no folder {cwd!r} on this machine; make it, or correct cwd in workflow_args"
    place = str(Path(cwd or ".") / name) if "/" in name else shutil.which(name, path=path)
    return "" if place and Path(place).exists() else f"there is no program {name!r} on this machine; {INSTALL}"


async def run_once(program: Program, request: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Run a program to its end with a request on its standard input; return the JSON of its last output line.

    Cancellation kills the program and all processes that it started.

    Raises:
        SandboxFailed: The program cannot be started, its exit code is not 0, or the last line is not a JSON object.
    """
    process = await program.start(env)
    try:
        out, err = await process.communicate(json.dumps(request).encode() + b"\n")
    finally:
        _kill(process)
    # lines of bytes end at line feeds and carriage returns: JSON may contain the other line breaks of a text's lines
    lines = out.strip().splitlines()
    if process.returncode:
        error_output = " | ".join(err.decode(errors="replace").strip().splitlines()[-TAIL:])[-1000:]
        raise SandboxFailed(f"{program.name} ended with {process.returncode}: {error_output}", kind="environment")
    return _parse_object(lines[-1].decode(errors="replace") if lines else "", program)


class _ProgramProcess:
    """One process of a kept program, and the requests that wait for its answers."""

    def __init__(self, program: Program, process: asyncio.subprocess.Process) -> None:
        self._program, self._process = program, process
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        # marks the error as retrieved, because the caller may have been cancelled
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self.over = False
        """Whether the process has stopped answering."""
        self._errors = asyncio.create_task(self._read_errors(), name="errors of a program")
        self._answers = asyncio.create_task(self._read(), name="answers of a program")
        self._timer = loop.call_later(READY_SECONDS, self._fail_start)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; raises the errors of :meth:`PersistentProgram.ask`."""
        await asyncio.shield(self._ready)
        if self.over:
            raise self._failure("ended")
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**request, "id": number}).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the process has ended; _read() reports the reason
                await self._process.stdin.drain()
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self, seconds: float) -> None:
        """Close the program's input, kill the program if it does not end within ``seconds``, and wait until its output
        is read.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            log.warning("program_killed", program=self._program.name)
        finally:
            _kill(self._process)
        await asyncio.gather(self._answers, self._errors, return_exceptions=True)

    def _fail_start(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(self._failure(f"was not ready within {READY_SECONDS:g} s"))
            _kill(self._process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._handle_line(line.decode(errors="replace"))
        except ValueError:
            log.warning("program_line_too_long", program=self._program.name, limit=LONGEST_LINE)
        self.over = True
        self._timer.cancel()
        with contextlib.suppress(TimeoutError):  # it closed its output but still runs: nobody can read its answers
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        _kill(self._process)
        code = await self._process.wait()
        await self._errors
        error = self._failure(f"ended with {code}")
        if not self._ready.done():
            self._ready.set_exception(error)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _handle_line(self, line: str) -> None:
        try:
            message = _parse_object(line, self._program)
        except SandboxFailed as error:
            log.warning("program_output_invalid", program=self._program.name, reason=str(error))
            return
        if message.get("ready") and not self._ready.done():
            self._ready.set_result(None)
        waiting = self._waiting.get(message["id"]) if isinstance(message.get("id"), int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line without an end: the rest is not read
            while line := await self._process.stderr.readline():
                self._tail.append(line.decode(errors="replace").rstrip())

    def _failure(self, how: str) -> SandboxFailed:
        error_output = " | ".join(self._tail)[-1000:]
        return SandboxFailed(f"{self._program.name} {how}: {error_output}", kind="environment")


class PersistentProgram:
    """A program that answers many requests. A request starts the program if it does not run."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._processes: list[_ProgramProcess] = []
        """The latest process, and earlier processes that have not been closed."""
        self._starting = asyncio.Lock()

    @property
    def runs(self) -> bool:
        """Whether the latest process of the program may still answer."""
        return bool(self._processes) and not self._processes[-1].over

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            SandboxFailed: The program cannot be started, was not ready in time, or ended before it answered.
        """
        async with self._starting:
            if not self.runs:
                await self.close()
                self._processes.append(_ProgramProcess(self._program, await self._program.start()))
            process = self._processes[-1]
        return await process.ask(request)

    async def close(self, seconds: float = END_SECONDS) -> None:
        """End all processes of the program.

        Args:
            seconds: Seconds that a process may still run after its input was closed. Then it is killed.
        """
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.close(seconds) for process in processes))


_KEPT: dict[asyncio.AbstractEventLoop, dict[tuple[Program, int], PersistentProgram]] = {}
"""Kept programs by event loop, and by program and number of the process."""


def kept(program: Program, number: int = 0) -> PersistentProgram:
    """Return the kept program with this command, environment and working directory on this event loop.

    Args:
        program: The program.
        number: Number of the process, if several processes of the program are kept.
    """
    for loop in [loop for loop in _KEPT if loop.is_closed()]:
        del _KEPT[loop]
    programs = _KEPT.setdefault(asyncio.get_running_loop(), {})
    return programs.setdefault((program, number), PersistentProgram(program))


async def close_persistent_programs() -> None:
    """End the kept programs of this event loop."""
    programs = _KEPT.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(program.close() for program in programs.values()))


def _parse_object(line: str, program: Program) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise SandboxFailed(
            f'{program.name} printed {line[:200]!r}, wanted a JSON object in its last line, such as {{"reward": 1.0}}',
            kind="environment",
            retryable=False,
        )
    return parsed


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def make_program(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None = None, *, is_isolated: bool = False
) -> Program:
    """Return a hashable program from its parts."""
    return Program(tuple(command), tuple(sorted(env.items())), cwd, is_isolated)
