"""Keeps processes alive: starts them, restarts them after a crash, fails with a reason, and ends them in order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trinity_mq.bus.retry import exponential_pause
from trinity_mq.config import SupervisorConfig
from trinity_mq.runtime.errors import EXIT_DISK_FULL, EXIT_FATAL, EXIT_RECYCLE
from trinity_mq.runtime.process import disk_full_message
from trinity_mq.runtime.processes.exit_reasons import exit_reason, read_output_tail
from trinity_mq.runtime.processes.forking import ForkedProcess, Process, Starter, adopted_orphans, start_command

EXIT_NOT_STARTED = 127
"""Exit code of a program that cannot be started, as in a shell, or whose output file cannot be opened."""
PARENT_VARIABLE = "TRINITY_MQ_PARENT"
"""Environment variable with the supervisor's process id, for :func:`~trinity_mq.runtime.process.die_with_parent`."""

FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
"""Seconds before the first restart, and maximum before later restarts. The delay doubles with each restart."""

What = Literal["started", "died", "restarting", "finished", "stopped", "killed", "failed"]
Phase = Literal["new", "running", "waiting", "finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to keep alive."""

    name: str
    """Unique name, also of the output file."""
    role: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to the supervisor's own environment."""
    starts_anew: bool = False
    """Whether the process is started with its command line instead of forked, since a library reads its environment at
    its import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """A change of a process."""

    name: str
    role: str
    what: What
    """``died``: it ended by itself with an error. ``stopped``: it ended on request, or requested a new process by exit
    code 79. ``killed``: SIGKILL ended it, because it did not stop in time or all processes were killed."""
    pid: int | None = None
    code: int | None = None
    """Exit code; 128 + n for signal n."""
    delay: float = 0.0
    """restarting: seconds until the restart."""
    restarts: int = 0
    """restarting: number of restarts within the window, including this restart."""
    reason: str = ""
    output: str = ""
    """died, failed, restarting: the reason from :func:`~trinity_mq.runtime.processes.exit_reasons.exit_reason`, empty
    if only the exit code is known."""


class _Child:
    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.phase: Phase = "new"
        self.process: Process | None = None
        self.restarts: collections.deque[float] = collections.deque()
        self.code = 0
        self.exit_code = 0
        """Exit code of the process at its last end; 128 + n for signal n."""
        self.output_start = 0
        """Size of the output file in bytes when the process was started."""
        self.stopping = False
        self.replacing = False
        self.forced = False
        self.woken = asyncio.Event()
        """Set to end the wait before a restart early."""
        self.ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Runs a set of processes, each in a session of its own, with output to ``<log_dir>/<name>.out``.

    Exit codes: 0 means finished, 78 (EX_CONFIG) that a restart does not help, 74 that the disk is full. 79 requests a
    new process at once, which is not counted as a restart. After any other exit the process is restarted with a growing
    delay, at most ``max_restarts`` times within ``restart_window``. A process that may not be restarted, or cannot be
    started, has failed, and all others are drained.

    Args:
        specs: The processes.
        config: Limits.
        log_dir: Folder of the output files, created if missing.
        on_event: Called on the event loop with every change of a process.
        backoff: Returns the seconds to wait before a restart, from the number of restarts within the window.
        start: Starts a process.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        config: SupervisorConfig,
        log_dir: Path,
        on_event: Callable[[ProcessEvent], None] = lambda _event: None,
        backoff: Callable[[int], float] | None = None,
        start: Starter = start_command,
    ) -> None:
        self._children = {spec.name: _Child(spec) for spec in specs}
        if len(self._children) != len(specs):
            raise ValueError(f"processes need different names, got {sorted(spec.name for spec in specs)}")
        self._config, self._log_dir, self._on_event = config, log_dir, on_event
        self._backoff, self._start = backoff or exponential_backoff, start
        self._orphans: list[ForkedProcess] = []
        self._killing = False

    @property
    def phases(self) -> dict[str, Phase]:
        """The phase of each process, by name."""
        return {name: child.phase for name, child in self._children.items()}

    async def run(self) -> int:
        """Run all processes until each has finished, was drained, or failed; return the highest exit code, where a
        process that ended on request counts 0.

        If cancelled, kill the running processes before returning.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children.values():
                    group.create_task(self._keep_alive(child, group), name=f"keep {child.spec.name}")
        finally:
            self.kill()
            for child in self._children.values():
                if child.process is not None:
                    await child.process.wait()
        return max((child.code for child in self._children.values()), default=0)

    async def restart(self, name: str) -> None:
        """Stop the process ``name`` and start it again without counting a restart. A process that has ended for good is
        not started.
        """
        child = self._child(name)
        if child.stopping or child.ended.is_set():
            return
        child.replacing = True
        child.woken.set()
        await self._stop(child)

    async def drain(self, *names: str) -> None:
        """End the processes ``names`` (default: all): SIGTERM, and SIGKILL after the grace period. Return when they
        have ended.
        """
        children = [self._child(name) for name in names] if names else list(self._children.values())
        for child in children:
            child.stopping = True
            child.woken.set()
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(self._stop(child))
        for child in children:
            if child.phase != "new":
                await child.ended.wait()

    def kill(self) -> None:
        """Send SIGKILL to all processes and restart none of them."""
        self._killing = True
        for child in self._children.values():
            child.stopping = child.forced = True
            child.woken.set()
            _send(child, signal.SIGKILL)

    def _child(self, name: str) -> _Child:
        if name not in self._children:
            raise KeyError(f"no process {name!r}; known: {', '.join(sorted(self._children))}")
        return self._children[name]

    async def _stop(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            if not self._killing:
                _send(child, signal.SIGTERM)
                async with asyncio.timeout(self._config.grace):
                    await process.wait()
                return
        child.forced = True
        _send(child, signal.SIGKILL)
        await process.wait()

    async def _keep_alive(self, child: _Child, group: asyncio.TaskGroup) -> None:
        try:
            while not child.stopping:
                code = await self._run_once(child)
                if code is None or not await self._should_restart(child, code):
                    break
            else:
                child.phase = "stopped"
                self._emit(child, "stopped")
        finally:
            child.ended.set()
        if child.phase == "failed":
            other_names = [name for name, sibling in self._children.items() if sibling is not child]
            if other_names:
                group.create_task(self.drain(*other_names))

    async def _run_once(self, child: _Child) -> int | None:
        """Run the process once and return its exit code; None if it could not be started."""
        spec = child.spec
        child.forced = False
        child.woken.clear()
        path = self._output(child)
        try:
            output = path.open("ab")
        except OSError as error:
            full = disk_full_message(error)
            code = EXIT_NOT_STARTED if full is None else EXIT_DISK_FULL
            self._fail(child, code, full or f"{path} cannot be opened: {error.strerror or error}")
            return None
        try:
            with output:
                child.output_start = output.tell()
                start = start_command if spec.starts_anew else self._start
                env = {**os.environ, **spec.env, PARENT_VARIABLE: str(os.getpid())}
                child.process = await start(spec.argv, env, output)
        except OSError as error:
            self._fail(child, EXIT_NOT_STARTED, f"{spec.argv[0]} cannot be started: {error}")
            return None
        child.phase, child.replacing = "running", False
        self._emit(child, "started")
        if child.stopping:  # a stop during the start found no process to stop
            await self._stop(child)
        code = await child.process.wait()
        self._orphans = [orphan for orphan in self._orphans if orphan.returncode is None] + adopted_orphans(
            child.process.pid
        )
        child.exit_code = code if code >= 0 else 128 - code
        return child.exit_code

    async def _should_restart(self, child: _Child, code: int) -> bool:
        """Handle an exit, and wait for the delay of a restart; return True to start the process again now."""
        if child.stopping:
            child.phase = "stopped"
            as_requested = code == 0 or (code == 128 + signal.SIGTERM and not child.forced)
            child.code = 0 if as_requested else code
            self._emit(child, "killed" if child.forced else "stopped", code=code)
            return False
        if child.replacing or code == EXIT_RECYCLE:
            self._emit(child, "killed" if child.forced else "stopped", code=code)
            return True
        if code == 0:
            child.phase = "finished"
            self._emit(child, "finished", code=0)
            return False
        self._emit(child, "died", code=code)
        if code == EXIT_FATAL:
            return self._fail(child, code, "a restart does not help")
        if code == EXIT_DISK_FULL:  # the output file may not have been written either
            return self._fail(child, code, f"a disk is full, see `df -h {self._log_dir.parent}`: make room")
        now = asyncio.get_running_loop().time()
        child.restarts.append(now)
        while child.restarts[0] <= now - self._config.restart_window:
            child.restarts.popleft()
        count = len(child.restarts)
        if count > self._config.max_restarts:
            window = self._config.restart_window
            return self._fail(child, code, f"it died {count} times within {window:g} s")
        await self._wait_before_restart(child, count)
        return True

    def _fail(self, child: _Child, code: int, reason: str) -> bool:
        child.phase, child.code = "failed", code
        self._emit(child, "failed", code=code, reason=reason)
        return False

    async def _wait_before_restart(self, child: _Child, count: int) -> None:
        delay = self._backoff(count)
        child.phase = "waiting"
        self._emit(child, "restarting", delay=delay, restarts=count)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await child.woken.wait()

    def _emit(self, child: _Child, what: What, *, code: int | None = None, reason: str = "", **numbers: float) -> None:
        self._on_event(
            ProcessEvent(
                name=child.spec.name,
                role=child.spec.role,
                what=what,
                pid=child.process.pid if child.process is not None else None,
                code=code,
                delay=numbers.get("delay", 0.0),
                restarts=int(numbers.get("restarts", 0)),
                reason=reason,
                output=self._exit_reason(child) if what in {"died", "failed", "restarting"} else "",
            )
        )

    def _output(self, child: _Child) -> Path:
        return self._log_dir / f"{child.spec.name}.out"

    def _exit_reason(self, child: _Child) -> str:
        return exit_reason(read_output_tail(self._output(child), child.output_start), child.exit_code)


def exponential_backoff(restarts: int) -> float:
    """Return the seconds to wait before the n-th restart within the window."""
    return exponential_pause(FIRST_DELAY, LONGEST_DELAY, restarts)


def _send(child: _Child, signum: signal.Signals) -> None:
    if child.alive and child.process is not None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signum)
