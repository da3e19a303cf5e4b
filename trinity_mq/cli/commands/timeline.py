"""``trinity-mq timeline``: writes a run's timeline as a Chrome trace from the metrics in its folder, or prints one
batch of its trace as a waterfall.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.commands.waterfall import as_json, as_text, batch_waterfall
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.target import RUNS, find_configuration, known_runs
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics
from trinity_mq.telemetry.timeline import chrome_trace, spans

TIMELINE_FILE = "timeline.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq timeline``."""
    add_target(parser)
    parser.add_argument("--steps", metavar="FIRST-LAST", help="only these batches, such as 10-30")
    parser.add_argument(
        "--batch",
        metavar="N",
        help="print what every process did for one batch, and where it waited; FIRST-LAST: the medians of several. The "
        "run needs monitor.trace=true",
    )
    parser.add_argument("--json", action="store_true", help="with --batch: as JSON")
    parser.add_argument("--out", metavar="FILE", help=f"where to (default: {TIMELINE_FILE} in the run's folder)")


def timeline(arguments: argparse.Namespace) -> int:
    """Write the run's timeline and print its path, or print the waterfall of one batch. Return 0."""
    folder = run_folder(arguments)
    if arguments.batch is not None:
        waterfall = batch_waterfall(folder, arguments.batch)
        print(as_json(waterfall) if arguments.json else as_text(waterfall))
        return 0
    if arguments.json:
        raise CommandError("--json is for one batch: add --batch N")
    out = Path(arguments.out) if arguments.out else folder / TIMELINE_FILE
    print(write_timeline(folder, out, _steps(arguments.steps)))
    return 0


def write_timeline(folder: Path, out: Path | None = None, steps: tuple[int, int] | None = None) -> Path:
    """Write the timeline of the run in ``folder`` and return the file. ``steps`` limits it to (first, last) batches,
    both included.

    Raises:
        CommandError: The metrics hold no durations, or the file cannot be written.
    """
    metrics, out = folder / METRICS_FILE, out or folder / TIMELINE_FILE
    all_spans = spans(read_metrics(metrics))
    chosen = [span for span in all_spans if steps is None or steps[0] <= span.step <= steps[1]]
    if not chosen:
        missing = (
            f"no batch from {steps[0]} to {steps[1]}" if steps and all_spans else "no line that says how long it took"
        )
        raise CommandError(f"{metrics} has {missing}: nothing to show; wait for the run's first batch, or look there")
    try:
        write_atomic(out, chrome_trace(chosen).encode())
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror or error}; give --out another place") from error
    return out


def run_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that TARGET and its settings name. A folder with metrics is enough, because agents
    started without ``trinity-mq run`` write no configuration there.

    Raises:
        CommandError: The folder does not exist.
    """
    path = Path(arguments.target)
    if not (path / METRICS_FILE).is_file():
        config = find_configuration(arguments.target, arguments.overrides)
        path = RUNS / arguments.target if config is None else config.path
    if not path.is_dir():
        raise CommandError(f"{path}: no run has left a folder there{known_runs()}")
    return path


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise CommandError(f"--steps is {text!r}, wanted FIRST-LAST such as 10-30")
    return int(match[1]), int(match[2])
