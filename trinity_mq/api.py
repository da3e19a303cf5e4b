"""Runs from Python: starts a run from a notebook or a script, follows its metrics, stops it.

The run is ``trinity-mq run`` in a process of its own, with all its agents: what holds there holds here. It drains when
the interpreter that started it ends, however that ends, since then the pipe that it reads from closes.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from trinity_mq.cli.reports.figures import evaluations
from trinity_mq.cli.reports.text import make_report
from trinity_mq.cli.run.follow import MetricsTail
from trinity_mq.config import Config, ConfigError, literal, load_config, load_stages
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics

LOOK_AGAIN = 0.2
"""Seconds between two looks at the metrics file, which other processes write."""
STOP_SECONDS = 60.0
"""Seconds that a run may take to stop when asked to, before its processes are killed."""


class RunError(RuntimeError):
    """A run that could not be started or did not finish; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The metrics that an agent reported of one step."""

    role: str
    """Role of the agent."""
    step: int
    """Batch, or number of closed batches for evaluations."""
    values: Mapping[str, float]
    """By name, as docs/metrics.md lists them."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended."""

    code: int
    """Exit code: 0 done as asked, 3 ended early, 4 trained nothing, 130 or 143 stopped."""
    folder: Path
    """Folder of the run: metrics, logs, checkpoints."""
    model: Path | None
    """The trained model, a Hugging Face folder; None where there is none."""
    evaluations: Mapping[str, Sequence[tuple[int, float]]]
    """``(step, accuracy)`` of each evaluation, by taskset."""
    report: str
    """The report that ``trinity-mq run`` ends with."""

    @property
    def finished(self) -> bool:
        """Whether it did all that was asked."""
        return self.code == 0


@dataclass(slots=True, weakref_slot=True)
class RunHandle:
    """A run under way, to be used as a context manager too: leaving it stops the run. Keep it: a run whose handle is
    gone is stopped as well.

    Made by :func:`run`.
    """

    config: Config
    """The configuration of the run."""
    process: subprocess.Popen[bytes]
    """``trinity-mq run``."""
    _tail: MetricsTail
    _files: Path
    """Folder of the configuration as it was given and of what was printed; removed with the handle."""
    _latest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self._files, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.config.path.absolute()

    @property
    def running(self) -> bool:
        """Whether the run goes on."""
        return self.process.poll() is None

    @property
    def latest(self) -> Mapping[str, float]:
        """The newest value of every metric that was read by :meth:`metrics`."""
        return dict(self._latest)

    @property
    def output(self) -> str:
        """The text that ``trinity-mq run`` has printed."""
        return (self._files / "output.txt").read_text(errors="replace")

    def metrics(self) -> Iterator[MetricsLine]:
        """Yield what the agents report, as it comes, until the run has ended; every line once in all."""
        while True:
            is_over = not self.running
            yield from self._read()
            if is_over:
                return
            time.sleep(LOOK_AGAIN)

    async def __aiter__(self) -> AsyncIterator[MetricsLine]:
        """Yield the same for ``async for line in handle``; the event loop is not blocked."""
        while True:
            is_over = not self.running
            for line in await asyncio.to_thread(self._read):
                yield line
            if is_over:
                return
            await asyncio.sleep(LOOK_AGAIN)

    def wait(self, timeout: float | None = None) -> RunResult:
        """Return the result once the run has ended.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: It goes on.
            RunError: It has ended before it did anything.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.config.name!r} goes on after {timeout:g} s") from error
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self._result(code)

    def stop(self, timeout: float = STOP_SECONDS) -> RunResult:
        """Have the run finish what it has in hand and end; :func:`run` with the same configuration goes on with it.

        Args:
            timeout: Seconds after which its processes are killed; what they had in hand is done again then.
        """
        if self.running:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)  # the second time it kills its agents
        return self.wait()

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the run if it goes on."""
        if self.running:
            self.stop()

    def _read(self) -> list[MetricsLine]:
        found = [MetricsLine(one.role, one.step, dict(one.values)) for one in self._tail.read()]
        for line in found:
            self._latest.update(line.values)
        return found

    def _result(self, code: int) -> RunResult:
        lines = read_metrics(self.folder / METRICS_FILE) if (self.folder / METRICS_FILE).exists() else []
        if not lines and code:
            raise RunError(f"run {self.config.name!r} has ended with exit code {code}: {_end(self.output)}")
        results: dict[str, list[tuple[int, float]]] = {}
        for line in lines:
            for taskset, value in evaluations(line).items():
                results.setdefault(taskset, []).append((line["step"], value))
        model = self.folder / "final"
        report = make_report(self.config.name, self.folder)
        return RunResult(code, self.folder, model if model.is_dir() else None, results, report)


def run(
    config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, fresh: bool = False
) -> RunHandle:
    """Start a run and return its handle at once.

    A run of the same name or folder that was stopped goes on, and one that has finished is over at once, as with
    ``trinity-mq run``. It works inside and outside of a running event loop.

    Args:
        config: A configuration, the same as a mapping, or a YAML file.
        overrides: ``section.key=value`` words over it.
        fresh: Train anew; an earlier run's folder is kept beside.

    Raises:
        ConfigError: The configuration cannot be used, or describes stages.
    """
    given: Mapping[str, Any] | Path
    given = config.model_dump(mode="json") if isinstance(config, Config) else config  # type: ignore[assignment]
    if isinstance(given, str):
        given = Path(given)
    if load_stages(given, overrides):
        raise ConfigError(f"{given}: holds stages; run them one after the other, or all with `trinity-mq run`")
    checked = load_config(given, overrides)
    folder = Path(tempfile.mkdtemp(prefix="trinity-mq-"))
    file, output = folder / "config.yaml", folder / "output.txt"
    # readable by the owner only, as a run's own is: it may hold what an environment variable said
    write_atomic(file, yaml.safe_dump(literal(checked.model_dump(mode="json")), sort_keys=False).encode(), 0o600)
    tail = MetricsTail(checked.path)
    if not fresh:
        tail.read()  # of earlier starts
    command = [sys.executable, "-m", "trinity_mq.cli.main", "run", "--plain", "--attached"]
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [*command, *(["--fresh"] if fresh else []), str(file)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the notebook is not one of the run
        )
    return RunHandle(checked, process, tail, folder)


def _end(text: str, lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-lines:]) or "it printed nothing"
