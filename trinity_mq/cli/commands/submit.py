"""``trinity-mq submit``: publishes a task to a run, and waits for its outcome."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity_mq.bus import Bus, Envelope, Topology
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import connected, find_target
from trinity_mq.cli.errors import CommandError
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import JSON_CONTENT_TYPE, SubmissionOutcome, TaskBody, TaskSubmission, decode

EXAMPLE = '{"raw_task": {"question": "+372=", "answer": "7"}}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq submit``."""
    add_target(parser)
    add_broker(parser)
    parser.add_argument(
        "--task", metavar="JSON", default="-", help="the task, @FILE for a file, - for standard input (default)"
    )
    parser.add_argument("--wait", metavar="SECONDS", type=float, help="wait for the outcome and print it as JSON")
    parser.add_argument(
        "--id", default="", help="submission id; a task with an id that is known is not run again (default: a new one)"
    )


def submit(arguments: argparse.Namespace) -> int:
    """Publish a task; with ``--wait`` print its outcome as JSON, 1 when it did not finish."""
    target = find_target(arguments)
    submission = TaskSubmission(task=read_task(arguments.task), submission_id=arguments.id)
    if target.broker.url is None:
        raise CommandError(
            f"run {target.run!r} does not run now, nor does its private broker: start it with `trinity-mq run`, then "
            "submit the task"
        )
    outcome = asyncio.run(_submit(target.run, target.broker, submission, arguments.wait))
    if outcome is None:
        return 0
    print(json.dumps(outcome.model_dump(mode="json")))
    return 0 if outcome.outcome in {"finished", "partial"} else 1


def read_task(text: str) -> TaskBody:
    """Return the task in ``text``: JSON, ``@FILE`` or ``-`` for standard input.

    Raises:
        CommandError: It cannot be read, or is not a task.
    """
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        elif text == "-":
            text = sys.stdin.read()
        fields = json.loads(text)
    except OSError as error:
        raise CommandError(f"task {text!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(f"the task is not JSON: {error}; wanted something like {EXAMPLE}") from error
    if not isinstance(fields, dict):
        raise CommandError(f"the task is a {type(fields).__name__}, wanted an object like {EXAMPLE}")
    for key in fields:
        if key not in TaskBody.model_fields:
            near = difflib.get_close_matches(key, TaskBody.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TaskBody.model_fields)}"
            raise CommandError(f"the task has an unknown key {key!r}; {hint}")
    try:
        return TaskBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CommandError(f"the task's {where}: {first['msg']}, got {first['input']!r}") from error


async def _submit(
    run: str, broker: BrokerConfig, submission: TaskSubmission, wait: float | None
) -> SubmissionOutcome | None:
    async with connected(run, broker, "submit") as (bus, topology):
        if wait is None:
            await _publish(bus, topology, submission, None)
            return None
        # exclusive: it goes with this process, whatever becomes of it
        replies = topology.listener("submit", uuid.uuid4().hex, "replies")
        await bus.declare(replies)
        async with await bus.consume(replies) as subscription:
            await _publish(bus, topology, submission, replies.name)
            try:
                async with asyncio.timeout(wait):
                    async for delivery in subscription:
                        await delivery.ack()
                        if delivery.kind == SubmissionOutcome.kind:
                            return decode(delivery.body, SubmissionOutcome, delivery.content_type)
            except TimeoutError:
                raise CommandError(
                    f"no outcome within {wait:g} s; the task is with run {run!r} and may still be done "
                    "(see `trinity-mq status`)"
                ) from None
    raise CommandError("the reply queue was closed before the outcome came")


async def _publish(bus: Bus, topology: Topology, submission: TaskSubmission, reply_to: str | None) -> None:
    body: dict[str, Any] = {
        "kind": submission.kind,
        "version_number": submission.version_number,
        **submission.model_dump(mode="json"),
    }
    message_id = submission.submission_id or uuid.uuid4().hex
    envelope = Envelope(
        body=json.dumps(body).encode(),
        kind=submission.kind,
        message_id=message_id,
        content_type=JSON_CONTENT_TYPE,
        headers={"kind": submission.kind, "version": submission.version_number},
        correlation_id=message_id,
        reply_to=reply_to,
    )
    if not await bus.publish(topology.exchange("tasks"), "submit", envelope):
        raise CommandError(
            f"run {topology.run!r} takes no tasks on this broker: was it ever started there? (trinity-mq run ...)"
        )
    print(f"submitted {message_id}", file=sys.stderr)
