"""``trinity-mq track``: sends the metrics and spans of a run to services, during the run or afterwards."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from trinity_mq.cli.arguments import add_target
from trinity_mq.errors import CommandError
from trinity_mq.observability.spans.collector import open_collector
from trinity_mq.observability.spans.forward import SpanForwarder
from trinity_mq.observability.trackers.base import Forwarder, TrackerError
from trinity_mq.observability.trackers.services import KINDS, open_trackers
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import load_target_configuration

OTLP = "otlp"
"""Service name for an OpenTelemetry collector, which receives spans instead of metrics."""
INTERVAL = 2.0
"""Poll interval of a live run's metrics file in seconds."""
FOLLOWING_NICE = 10
"""Increment of the niceness while following, so that the run has priority."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq track``."""
    add_target(parser)
    parser.add_argument(
        "--to",
        choices=(*KINDS, OTLP),
        action="append",
        metavar="SERVICE",
        help=f"one of {', '.join(KINDS)}, or {OTLP} for the spans of each batch; default: the run's",
    )
    parser.add_argument("--endpoint", metavar="URL", help=f"base URL of the collector of {OTLP}; default: the run's")
    parser.add_argument("--follow", action="store_true", help="continue until the standard input is closed, or Ctrl-C")


def track(arguments: argparse.Namespace) -> int:
    """Send the unsent metrics and spans of a run. With ``--follow``, send new data too until the standard input ends or
    a signal arrives. Print the locations of the data and return 0.

    Raises:
        CommandError: A service did not accept all data, no service is configured, or the run left no folder.
    """
    config = load_target_configuration(arguments)
    if not config.path.is_dir():  # before the trackers are opened, because they create folders below it
        raise CommandError(f"run {config.name!r} has no folder {config.path} yet, so there is nothing to send")
    kinds = arguments.to or [
        *(tracker.kind for tracker in config.monitor.trackers),
        *([OTLP] if config.monitor.otlp else []),
    ]
    trackers = open_trackers(config, [kind for kind in kinds if kind != OTLP]) if kinds != [OTLP] else []
    collector = open_collector(config, arguments.endpoint) if OTLP in kinds else None
    sample = 1.0 if config.monitor.otlp is None else config.monitor.otlp.sample
    try:
        forwarder = Forwarder(config.path, trackers)
        spans = None if collector is None else SpanForwarder(config.path, config.name, collector, sample)
    except TrackerError as error:
        raise CommandError(str(error)) from error
    ended = threading.Event()
    if arguments.follow:
        os.nice(FOLLOWING_NICE)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        threading.Thread(target=_wait_for_end, args=(ended,), name="standard input", daemon=True).start()
    forwarder.send()
    while arguments.follow and not ended.wait(INTERVAL):
        forwarder.send()
        if spans is not None:
            spans.send()
    for location in forwarder.finish():
        print(f"run {config.name!r}: {location}")
    problems = dict(forwarder.problems)
    if spans is not None and collector is not None:
        # while a run is live, its unfinished batches must stay open
        spans.finish(over=arguments.follow or RunFolder(config).holder() is None)
        lost = f", {spans.lost} refused" if spans.lost else ""
        print(f"run {config.name!r}: {spans.sent} spans to {collector.url}{lost}")
        if spans.problem:
            problems[OTLP] = spans.problem
    if problems:
        remedy = f"What was not sent is sent by `trinity-mq track {config.path}`"
        raise CommandError(". ".join([*problems.values(), remedy]))
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended.set()
