"""Control of runs from Python: starts a run from a notebook or a script, follows its metrics and stops it.

The run is a ``trinity-mq run`` process with all its agents, and behaves as on the command line. It drains when the
interpreter that started it ends, whatever the cause, because the pipe to its standard input then closes.
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

from trinity_mq.config import Config, ConfigError, escape_interpolations, load_config, load_stages
from trinity_mq.observability.follow import MetricsTail
from trinity_mq.observability.report.text import evaluation_curves, make_report
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics

LOOK_AGAIN = 0.2
"""Seconds between two reads of the metrics file, which other processes write."""
STOP_SECONDS = 60.0
"""Seconds that a run may take to stop after a request, before its processes are killed."""


class RunError(RuntimeError):
    """A run ended with an error before it wrote metrics; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The metrics that an agent reported for one step."""

    role: str
    """Role of the agent."""
    step: int
    """Position of the values in the run: the number of the batch; for evaluations, the number of closed batches; for
    gateways, the number of the train step."""
    values: Mapping[str, float]
    """Metric values by name, as listed in docs/metrics.md."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended."""

    code: int
    """Exit code: 0 finished, 2 not started, 3 ended early, 4 trained on nothing, 130 or 143 stopped."""
    folder: Path
    """Folder of the run: metrics, logs, checkpoints."""
    model: Path | None
    """The trained model, a Hugging Face folder; None if the run did not write one."""
    evaluations: Mapping[str, Sequence[tuple[int, float]]]
    """Evaluations by taskset, each as ``(step, result)``: the step as in :class:`MetricsLine`, and the accuracy, or the
    reward if the workflow reports no accuracy."""
    report: str
    """The report that ``trinity-mq run`` prints at the end."""

    @property
    def finished(self) -> bool:
        """Whether the run finished everything that was requested."""
        return self.code == 0


@dataclass(slots=True, weakref_slot=True)
class RunHandle:
    """A running run. As a context manager it stops the run on exit. Keep a reference: a run whose handle is deleted
    stops too.

    Created by :func:`run`.
    """

    config: Config
    """The configuration of the run."""
    process: subprocess.Popen[bytes]
    """The ``trinity-mq run`` process."""
    _tail: MetricsTail
    _files: Path
    """Folder with the configuration as passed and the printed output; removed with the handle."""
    _latest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self._files, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.config.path.absolute()

    @property
    def running(self) -> bool:
        """Whether the run is still running."""
        return self.process.poll() is None

    @property
    def latest(self) -> Mapping[str, float]:
        """The newest value of every metric that :meth:`metrics` has read."""
        return dict(self._latest)

    @property
    def output(self) -> str:
        """The text that ``trinity-mq run`` has printed."""
        return (self._files / "output.txt").read_text(errors="replace")

    def metrics(self) -> Iterator[MetricsLine]:
        """Yield reported metrics as they arrive, until the run has ended. Each line is yielded once over all calls."""
        while True:
            is_over = not self.running
            yield from self._read()
            if is_over:
                return
            time.sleep(LOOK_AGAIN)

    async def __aiter__(self) -> AsyncIterator[MetricsLine]:
        """Yield the lines of :meth:`metrics` for ``async for line in handle``, without blocking the event loop."""
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
            timeout: Seconds to wait; None: without limit.

        Raises:
            TimeoutError: The run has not ended in time.
            RunError: The run has failed before it wrote metrics.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.config.name!r} is still running after {timeout:g} s") from error
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self._result(code)

    def stop(self, timeout: float = STOP_SECONDS) -> RunResult:
        """Make the run finish its current work and end; return its result. :func:`run` with the same configuration
        resumes it.

        Args:
            timeout: Seconds after which the run's processes are killed. The interrupted work is repeated after a
                resume.

        Raises:
            RunError: As :meth:`wait`.
        """
        if self.running:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)  # the second interrupt makes the run kill its agents
        return self.wait()

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the run if it is still running."""
        if self.running:
            self.stop()

    def _read(self) -> list[MetricsLine]:
        lines = [MetricsLine(row.role, row.step, dict(row.values)) for row in self._tail.read()]
        for line in lines:
            self._latest.update(line.values)
        return lines

    def _result(self, code: int) -> RunResult:
        lines = read_metrics(self.folder / METRICS_FILE)
        if not lines and code:
            raise RunError(f"run {self.config.name!r} has ended with exit code {code}: {_end(self.output)}")
        model = self.folder / "final"
        report = make_report(self.config.name, self.folder)
        return RunResult(code, self.folder, model if model.is_dir() else None, evaluation_curves(lines), report)


def run(
    config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, fresh: bool = False
) -> RunHandle:
    """Start a run and return its handle at once.

    As with ``trinity-mq run``, a stopped run of the same name or folder resumes, and a finished run ends at once. The
    function works inside and outside a running event loop.

    Args:
        config: A configuration, a mapping with its settings, or a YAML file.
        overrides: ``section.key=value`` texts that override settings.
        fresh: Start from scratch. The folder of an earlier run is kept under another name.

    Raises:
        ConfigError: The configuration is not usable, or contains stages.
    """
    source: Mapping[str, Any] | Path
    source = config.model_dump(mode="json") if isinstance(config, Config) else config  # type: ignore[assignment]
    if isinstance(source, str):
        source = Path(source)
    if load_stages(source, overrides):
        raise ConfigError(f"{source}: holds stages; run them one after the other, or all with `trinity-mq run`")
    checked = load_config(source, overrides)
    folder = Path(tempfile.mkdtemp(prefix="trinity-mq-"))
    file, output = folder / "config.yaml", folder / "output.txt"
    # readable by the owner only, like the run's own file: it may hold values of environment variables
    write_atomic(
        file, yaml.safe_dump(escape_interpolations(checked.model_dump(mode="json")), sort_keys=False).encode(), 0o600
    )
    tail = MetricsTail(checked.path)
    tail.read()  # skip the lines of earlier starts
    command = [sys.executable, "-m", "trinity_mq.cli.main", "run", "--plain", "--attached"]
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [*command, *(["--fresh"] if fresh else []), str(file)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the notebook must not interrupt the run
        )
    return RunHandle(checked, process, tail, folder)


def _end(text: str, lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-lines:]) or "it printed nothing"
