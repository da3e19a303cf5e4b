"""``trinity-mq debug``: runs one task, one batch or one conversation, and shows its tokens."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.cli.arguments import add_actions, add_target
from trinity_mq.errors import CommandError
from trinity_mq.observability.experiences.show_experience import open_console
from trinity_mq.operations.debug.run import debug_task, find_task
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.targets.target import load_target_configuration

if TYPE_CHECKING:
    from trinity_mq.operations.debug.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq debug`` and their arguments."""
    add = add_actions(parser)
    action = add("workflow", "run a task once, and show every message, token, logprob and reward", workflow)
    add_target(action)
    action.add_argument(
        "--task", metavar="N", default="0", help="number of a record, or a task as JSON, @FILE or - (default: 0)"
    )
    action.add_argument("--taskset", metavar="NAME", help="a taskset by name (default: the first training taskset)")
    action.add_argument("--engine", metavar="URL", help="use the engine at this URL instead of starting an engine")
    action.add_argument("--weights", metavar="FOLDER", help="such as runs/x/final (default: the run's initial weights)")
    action.add_argument("--json", action="store_true", help="print one JSON object a line")
    action = add("algorithm", "run the algorithm on a small batch, show its gradient and check it", algorithm)
    add_target(action)
    action = add("render", "show a conversation as tokens, with mask and messages, and read its answers", render)
    add_target(action, "(here also a model's folder)")
    action.add_argument(
        "--conversation",
        metavar="JSON",
        required=True,
        help="messages, or a request with messages and tools, as JSON, @FILE or -",
    )
    action.add_argument("--tools", metavar="JSON", help="the offered tools, as JSON, @FILE or -")
    action.add_argument(
        "--switches", metavar="JSON", help="variables of the chat template, such as '{\"enable_thinking\": false}'"
    )
    action.add_argument("--json", action="store_true", help="print one JSON object")


def render(arguments: argparse.Namespace) -> int:
    """Show a conversation as tokens, and the answers that an engine would read from it. Return 0."""
    from trinity_mq.config.switches import SwitchError
    from trinity_mq.engines.generation.text import TextError
    from trinity_mq.operations.debug import render as rendering
    from trinity_mq.telemetry.jsonline import dump_line

    conversation = rendering.read_conversation(arguments.conversation, arguments.tools, arguments.switches)
    with tempfile.TemporaryDirectory(prefix="tmq-debug-") as scratch:
        codec = rendering.open_codec(arguments.target, arguments.overrides, Path(scratch))
    try:
        rendered = rendering.render_conversation(codec, conversation)
    except (TextError, SwitchError) as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        print(dump_line(rendering.as_json(rendered)))
    else:
        rendering.print_rendered(open_console(sys.stdout), rendered)
    return 0


def algorithm(arguments: argparse.Namespace) -> int:
    """Run the algorithm of a configuration on a small batch. Return 1 if a check failed, else 0."""
    from trinity_mq.operations.debug.algorithm import algorithm as run

    return run(arguments)


def workflow(arguments: argparse.Namespace) -> int:
    """Run a task once and print its calls, experiences and outcome. Return 1 if the workflow failed, else 0."""
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
