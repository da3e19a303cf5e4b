"""``trinity-mq submit``: publishes a task to a run and can wait for its outcome."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.errors import CommandError
from trinity_mq.messages import TaskSubmission
from trinity_mq.operations.submit import read_task, submit_task
from trinity_mq.targets.connection import find_target
from trinity_mq.transport.blobs import open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq submit``."""
    add_target(parser)
    add_broker(parser)
    parser.add_argument(
        "--task", metavar="JSON", default="-", help="the task, @FILE for a file, - for standard input (default)"
    )
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, help="wait for the outcome and the answers, and print them as JSON"
    )
    parser.add_argument(
        "--id", default="", help="submission id; a task with an id that is known is not run again (default: a new one)"
    )


def submit(arguments: argparse.Namespace) -> int:
    """Publish a task, and return 0. With ``--wait``, print its outcome and answers as JSON, and return 1 unless the
    outcome is ``finished`` or ``partial``.
    """
    target = find_target(arguments)
    submission = TaskSubmission(task=read_task(arguments.task), submission_id=arguments.id)
    if target.folder is not None and target.folder.finished:
        raise CommandError(f"run {target.run!r} has finished and takes no more tasks")
    if target.broker.url is None:
        raise CommandError(
            f"run {target.run!r} is stopped, and so is its private broker: start it with `trinity-mq run`, then "
            "submit the task"
        )
    replies = asyncio.run(submit_task(target, submission, arguments.wait))
    if replies is None or replies.outcome is None:
        return 0
    answers = replies.answers(open_store(target.broker, target.run))
    shown = {**replies.outcome.model_dump(mode="json"), "answers": answers}
    print(json.dumps(shown, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))
    if replies.missing:
        print(f"{replies.missing} parts of the answers did not come within {arguments.wait:g} s", file=sys.stderr)
    return 0 if replies.outcome.outcome in {"finished", "partial"} else 1
