"""Submits a task to a run and waits for its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity_mq.bus import Bus, BusUnavailable, Incoming, Topology
from trinity_mq.errors import CommandError, suggest
from trinity_mq.messages import ContentError, SubmissionOutcome, TaskBody, TaskSubmission, decode
from trinity_mq.messages.msgpack_scan import check_value
from trinity_mq.messages.tasks import TRUTH
from trinity_mq.runtime.deliveries import acknowledge, envelope
from trinity_mq.targets.connection import Target, connect_bus
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, resolve_body

PUBLISH_SECONDS = 20.0
"""Seconds for which a submission that the broker refuses is retried."""


EXAMPLE = '{"raw_task": {"question": "+372=", "answer": "7"}}'


class SubmissionReplies:
    """The replies to one submission: its outcome, and its experiences in parts that arrive in any order."""

    def __init__(self) -> None:
        self.outcome: SubmissionOutcome | None = None
        self._parts: dict[str | None, Incoming] = {}

    def take(self, message: Incoming) -> None:
        """Record a message. A redelivered message counts once."""
        if message.kind == SubmissionOutcome.kind:
            self.outcome = self.outcome or decode(message.body, SubmissionOutcome, message.content_type)
        else:
            self._parts[message.message_id] = message

    @property
    def missing(self) -> int:
        """Number of parts that the outcome announced and that have not arrived."""
        return 0 if self.outcome is None else max(0, self.outcome.experiences - len(self._parts))

    @property
    def complete(self) -> bool:
        """True if the outcome and all parts that it announced have arrived."""
        return self.outcome is not None and not self.missing

    def answers(self, store: BlobStore | None) -> list[dict[str, Any]]:
        """Return the text, the reward and the expected text of each answer that arrived, sorted by rollout and step.

        Raises:
            CommandError: A part cannot be read.
        """
        if not self._parts:
            return []
        from trinity_mq.experience import DecodeError, Experience  # imports torch

        try:
            bodies = [resolve_body(store, part.body, part.content_type) for part in self._parts.values()]
            experiences = [experience for body in bodies for experience in Experience.deserialize_many(body)]
        except (DecodeError, StoreUnavailable) as error:
            raise CommandError(f"the outcome came, and an answer cannot be read: {error}") from error
        experiences.sort(key=lambda experience: (experience.eid.run, experience.eid.step))
        return [
            {
                "run": experience.eid.run,
                "step": experience.eid.step,
                "text": experience.response_text,
                "reward": experience.reward,
                "expected": experience.info.get(TRUTH),
            }
            for experience in experiences
        ]


def read_json_argument(name: str, text: str, example: str) -> Any:
    """Return the JSON in an argument of the command line: JSON, ``@FILE`` or ``-`` for standard input.

    Args:
        name: Name of the argument, for errors.
        text: The argument.
        example: A valid argument, for errors.

    Raises:
        CommandError: The file cannot be read, or the text is not JSON.
    """
    try:
        if text.startswith("@"):
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        elif text == "-":
            text = sys.stdin.read()
        return json.loads(text)
    except OSError as error:
        raise CommandError(f"{name} {text!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{name} is not JSON: {error}; wanted {example}, @FILE or -") from error
    except RuntimeError as error:  # the user of a path ~USER is unknown
        raise CommandError(f"{name} {text!r} cannot be read: {error}") from error


def read_task(text: str) -> TaskBody:
    """Return the task in ``text``, an argument of the command line; see :func:`read_json_argument`.

    Raises:
        CommandError: The task cannot be read, or it is not a valid task.
    """
    fields = read_json_argument("--task", text, EXAMPLE)
    if not isinstance(fields, dict):
        raise CommandError(f"the task is a {type(fields).__name__}, wanted an object like {EXAMPLE}")
    for key in fields:
        if key not in TaskBody.model_fields:
            hint = suggest(key, TaskBody.model_fields, "known:")
            raise CommandError(f"the task has an unknown key {key!r}; {hint}")
    try:
        check_value(fields, finite=True)
        return TaskBody.model_validate(fields)
    except ContentError as error:
        raise CommandError(f"the task's {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(str(part) for part in problem["loc"])
        raise CommandError(f"the task's {location}: {problem['msg']}, got {problem['input']!r}") from error


async def submit_task(target: Target, submission: TaskSubmission, wait: float | None) -> SubmissionReplies | None:
    """Publish a task. Return its replies as soon as they are complete, or the replies that arrived within ``wait``
    seconds, with the outcome but perhaps not all parts. If ``wait`` is None, return None once the task is published.

    Raises:
        CommandError: The broker does not take the task, or its outcome does not arrive in time.
    """
    async with connect_bus(target.run, target.broker, "submit") as (bus, topology):
        if wait is None:
            await _publish(bus, topology, submission, None)
            return None
        # exclusive: the broker deletes the queue when this process disconnects
        queue = topology.listener("submit", uuid.uuid4().hex, "replies")
        await bus.declare(queue)
        replies = SubmissionReplies()
        async with await bus.consume(queue) as subscription:
            await _publish(bus, topology, submission.model_copy(update={"want_experiences": True}), queue.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    async for delivery in subscription:
                        await acknowledge(delivery)
                        replies.take(delivery)
                        if replies.complete:
                            return replies
    if replies.outcome is None:
        raise CommandError(
            f"no outcome within {wait:g} s; the task was sent to run {target.run!r} and may still finish (see "
            f"`trinity-mq status {target.run}`)"
        )
    return replies


async def _publish(bus: Bus, topology: Topology, submission: TaskSubmission, reply_to: str | None) -> None:
    message_id = submission.submission_id or uuid.uuid4().hex
    message = envelope(submission, message_id=message_id, correlation_id=message_id, reply_to=reply_to)
    try:
        taken = await bus.publish(topology.exchange("tasks"), "submit", message, timeout=PUBLISH_SECONDS)
    except BusUnavailable as error:
        waiting = await bus.depth(topology.submitted.name)
        raise CommandError(
            f"the broker did not take the task in {PUBLISH_SECONDS:g} s, in several tries ({error}). {waiting} tasks "
            "wait in the queue submitted: if it is full (broker.submitted_max_bytes), try again once the run has taken "
            f"some, with --id {message_id}: a task that is submitted twice with one id runs only once"
        ) from error
    if not taken:
        raise CommandError(
            f"run {topology.run!r} takes no tasks on this broker: was it ever started there? (trinity-mq run ...)"
        )
    print(f"submitted {message_id}", file=sys.stderr)
