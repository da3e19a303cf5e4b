"""A whole run as a child process, for tests that watch the run, kill its processes and read its files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from trinity_mq.telemetry import METRICS_FILE, read_metrics

LOOK_AGAIN = 0.2
"""Seconds between checks of a run's files: another process writes them without notification."""


class LocalRun:
    """``trinity-mq run CONFIG`` in a child process.

    Args:
        config: The YAML file.
        run_dir: The run folder.
        overrides: Further ``key=value`` arguments.
    """

    def __init__(self, config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        self._command = [
            sys.executable,
            "-m",
            "trinity_mq.cli.main",
            "run",
            str(config),
            f"run_dir={run_dir}",
            *overrides,
        ]
        self.process: asyncio.subprocess.Process | None = None
        self._output = bytearray()

    async def __aenter__(self) -> Self:
        """Start the run."""
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reading = asyncio.create_task(self._read_output())
        return self

    async def _read_output(self) -> None:
        """Collect the output until the run closes it: a run whose output is not read blocks when the pipe is full."""
        assert self.process is not None
        assert self.process.stdout is not None
        while part := await self.process.stdout.read(1 << 16):
            self._output += part

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the run if it is still running: drain it, and kill it if that takes too long."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await self.ended(60.0)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        self._reading.cancel()

    async def ended(self, seconds: float) -> tuple[int, str]:
        """Return exit code and output once the process of the run has ended.

        Raises:
            TimeoutError: The run did not end within ``seconds``.
        """
        assert self.process is not None
        async with asyncio.timeout(seconds):
            await asyncio.wait([self._reading])
            await self.process.wait()
        assert self.process.returncode is not None
        return self.process.returncode, self._output.decode(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics written so far."""
        return read_metrics(self.run_dir / METRICS_FILE)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one metric, in order of writing."""
        return [(line["step"], line[name]) for line in self.metrics() if name in line]

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return once ``condition`` holds.

        Raises:
            TimeoutError: The condition does not hold within ``seconds``.
            RuntimeError: The run ended first.
        """
        assert self.process is not None
        async with asyncio.timeout(seconds):
            while not condition():
                if self.process.returncode is not None:
                    raise RuntimeError(
                        f"the run ended with exit code {self.process.returncode} before the condition held"
                    )
                await asyncio.sleep(LOOK_AGAIN)

    async def until_progress(self, progress: int, seconds: float) -> None:
        """Return once the trainer has consumed batch ``progress``."""
        await self.until(lambda: any(step >= progress for step, _ in self.values("trainer/step")), seconds)

    def pid(self, agent: str) -> int | None:
        """Return the process id of an agent (the latest in its log), of ``engine`` or of ``fork server``; None if it is
        not known.
        """
        if agent == "fork server":
            assert self.process is not None
            for child in psutil.Process(self.process.pid).children():
                # other children, such as rabbitmqctl, may end during this check
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any("fork_server" in word for word in child.cmdline()):
                        return child.pid
            return None
        if agent == "engine":
            files = list((self.run_dir / "engines").glob("*.ready.json"))
            return int(json.loads(files[0].read_text())["pid"]) if files else None
        log = self.run_dir / "logs" / f"{agent}.jsonl"
        lines = (
            [json.loads(line) for line in log.read_text().split("\n") if '"agent_starts"' in line]
            if log.exists()
            else []
        )
        return int(lines[-1]["pid"]) if lines else None

    def kill(self, agent: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process of ``agent``, named as for :meth:`pid`; return its process id.

        Raises:
            ValueError: The process id is not known.
        """
        pid = self.pid(agent)
        if pid is None:
            raise ValueError(f"no process of {agent} is known")
        os.kill(pid, number)
        return pid
