"""``trinity-mq track``: sends the metrics of a run to services, while it runs or later."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.target import configuration
from trinity_mq.cli.trackers.base import Tracker, TrackerError
from trinity_mq.cli.trackers.forward import Forwarder
from trinity_mq.cli.trackers.services import open_tracker
from trinity_mq.config import Config, TrackerConfig

KINDS = ("wandb", "mlflow", "swanlab")
INTERVAL = 2.0
"""Seconds between two looks at the metrics file of a run that runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq track``."""
    add_target(parser)
    parser.add_argument(
        "--to", choices=KINDS, action="append", metavar="SERVICE", help=f"one of {', '.join(KINDS)}; default: the run's"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the standard input is closed, or Ctrl-C")


def track(arguments: argparse.Namespace) -> int:
    """Send the metrics of a run that were not sent yet, and say where they can be seen."""
    config = configuration(arguments)
    trackers = opened(config, arguments.to)
    if not config.path.is_dir():
        raise CommandError(f"run {config.name!r} has no folder {config.path} yet, so there are no metrics to send")
    try:
        forwarder = Forwarder(config.path, trackers)
    except TrackerError as error:
        raise CommandError(str(error)) from error
    ended = threading.Event()
    if arguments.follow:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        threading.Thread(target=_wait_for_end, args=(ended,), name="standard input", daemon=True).start()
    forwarder.send()
    while arguments.follow and not ended.wait(INTERVAL):
        forwarder.send()
    for place in forwarder.finish():
        print(f"run {config.name!r}: {place}")
    if problems := forwarder.problems:
        again = f"What was not sent is sent by `trinity-mq track {config.path}`"
        raise CommandError(". ".join([*problems.values(), again]))
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended.set()


def opened(config: Config, kinds: Sequence[str] | None = None) -> list[Tracker]:
    """Return the trackers of a configuration, or of ``kinds``.

    Raises:
        CommandError: There are none, or one is not installed.
    """
    known: dict[str, TrackerConfig] = {one.kind: one for one in config.monitor.trackers}
    wanted = [known.get(kind) or TrackerConfig.model_validate({"kind": kind}) for kind in kinds or known]
    if not wanted:
        raise CommandError("the run has no monitor.trackers: name a service with --to, one of " + ", ".join(KINDS))
    try:
        return [
            open_tracker(
                one.kind, config.name, Path(config.path), shown(config),
                project=one.project, group=one.group, offline=one.offline,
            )
            for one in wanted
        ]  # fmt: skip
    except TrackerError as error:
        raise CommandError(str(error)) from error


def shown(config: Config) -> dict[str, Any]:
    """Return the settings that services show beside metrics: what makes the result, and nothing about the broker."""
    kept = ("seed", "mode", "algorithm", "model", "buffer", "explorer", "operator", "trainer", "synchronizer")
    return config.model_dump(mode="json", include=set(kept))
