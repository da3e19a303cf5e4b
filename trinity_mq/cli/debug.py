"""``trinity-mq debug workflow``: runs one task once, and shows its calls, tokens, logprobs and rewards."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, TypeVar

from trinity_mq.cli.arguments import add_actions, add_target
from trinity_mq.operations.debug.run import debug_task, find_task
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.targets.target import load_target_configuration

if TYPE_CHECKING:
    from trinity_mq.operations.debug.report import Report

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq debug`` and their arguments."""
    add = add_actions(parser)
    action = add("workflow", "run a task once, and show every message, token, logprob and reward", workflow)
    add_target(action)
    action.add_argument(
        "--task", metavar="N", default="0", help="number of a record, or a task as JSON, @FILE or - (default: 0)"
    )
    action.add_argument("--taskset", metavar="NAME", help="an evaluation taskset (default: the training taskset)")
    action.add_argument("--engine", metavar="URL", help="use the engine at this URL instead of starting an engine")
    action.add_argument("--weights", metavar="FOLDER", help="such as runs/x/final (default: the run's initial weights)")
    action.add_argument("--json", action="store_true", help="print one JSON object a line")
    action = add("algorithm", "run the algorithm on a small batch, show its gradient and check it", algorithm)
    add_target(action)


def algorithm(arguments: argparse.Namespace) -> int:
    """Run the algorithm of a configuration on a small batch."""
    from trinity_mq.operations.debug.algorithm import algorithm as run

    return run(arguments)


def workflow(arguments: argparse.Namespace) -> int:
    """Run a task once and print its events. Return 1 if it failed."""
    from trinity_mq.operations.debug.report import JsonReport, TextReport
    from trinity_mq.telemetry import setup_logging

    config = load_target_configuration(arguments)
    add_plugins(config.plugin_dirs)
    number, body = find_task(config, arguments.task, arguments.taskset)
    setup_logging("debug", "debug", None, "error")
    report: Report = JsonReport(sys.stdout) if arguments.json else TextReport(sys.stdout)
    report.task(number, body)
    with contextlib.redirect_stdout(sys.stderr):  # keep the workflow's prints out of the report
        return run_until_complete(debug_task(config, body, number, arguments, report))
