"""Submits the tasks of sessions to the explorer, each task once as far as the queue's depth shows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import TypeVar

import structlog

from trinity_agents.gateway.session_stream import SessionStream
from trinity_mq.bus import Bus, BusUnavailable, MessageTooLarge, Topology
from trinity_mq.bus.topology import BY_GATEWAY
from trinity_mq.config import Config
from trinity_mq.gateway.ledger import Ledger
from trinity_mq.gateway.recorded_call import RECORDED_SESSIONS
from trinity_mq.gateway.session import Session
from trinity_mq.messages import ContentError, SubmissionOutcome, TaskBody, TaskSubmission, encode
from trinity_mq.rewards.outsiders import NotAllowed, restrict_task
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.telemetry.trace_ids import TRACEPARENT

log = structlog.get_logger(__name__)

T = TypeVar("T")

REPLAYED = ("messages", "tools", "prompt")
"""Fields of a session's first request that are copied into the task of its replay."""
AT_ONCE = 64
"""Maximum number of concurrent publishes."""
RESUBMIT_SECONDS = 600.0
"""Seconds without an outcome after which a task is submitted again if the queue holds fewer messages than tasks wait,
because its message may be lost. The explorer ignores repeated submissions."""
CHECK_SECONDS = 60.0
"""Seconds between two checks for overdue tasks."""
SUBMIT_WITHIN = 10.0
"""Maximum seconds for the confirm of a submission."""
FULL_SECONDS = 30.0
"""Seconds until the next attempt after the queue did not accept a submission."""


class Submissions:
    """The tasks that the acting gateway submits to the explorer's queue.

    A new acting gateway cannot know which of the waiting tasks were submitted. It submits again as many tasks as the
    number of waiting tasks exceeds the number of messages in the queue. The queue then never holds more messages than
    tasks wait, including the submissions of other programs.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: The run's names.
        store: The sessions.
    """

    def __init__(self, config: Config, bus: Bus, topology: Topology, store: SessionStream) -> None:
        self._config, self._bus, self._topology, self._store = config, bus, topology, store
        self._ledger: Ledger | None = None
        self._waiting: dict[str, None] = {}
        """Ids of submissions to publish, in order."""
        self._submitted: dict[str, float] = {}
        """Event loop time of each submission by id, including submissions of earlier gateways."""
        self._checked = self._retry_at = float("-inf")

    async def submit(self) -> None:
        """Submit new tasks, and submit again the tasks whose message may be lost."""
        now = asyncio.get_running_loop().time()
        ledger = self._store.ledger
        if ledger is not self._ledger:  # at the start, and after the ledger was rebuilt
            self._ledger = ledger
            ledger.take_new_tasks()
            earlier = [name for name, _ in ledger.queued() if name not in self._submitted]
            await self._resubmit(earlier[::-1], now)  # newest first: an earlier gateway may not have reached them
        elif now - self._checked >= CHECK_SECONDS:
            self._checked = now
            queued = {name for name, _ in ledger.queued()}
            self._submitted = {name: at for name, at in self._submitted.items() if name in queued}
            overdue = [name for name, at in self._submitted.items() if now - at >= RESUBMIT_SECONDS]
            await self._resubmit(sorted(overdue, key=self._submitted.__getitem__), now)
        self._waiting |= dict.fromkeys(ledger.take_new_tasks())
        if now >= self._retry_at:
            await self._publish_waiting(ledger, now)

    async def _resubmit(self, names: Sequence[str], now: float) -> None:
        """Schedule the first tasks of ``names`` for publication again, as many as messages must have been lost."""
        if not names:
            return
        depth = await self._bus.depth(self._topology.submitted.name) or 0
        lost = max(0, len(self._store.ledger.queued()) - depth)
        self._submitted |= dict.fromkeys(names, now)
        self._waiting |= dict.fromkeys(names[:lost])

    async def _publish_waiting(self, ledger: Ledger, now: float) -> None:
        names = list(self._waiting)
        for begin in range(0, len(names), AT_ONCE):
            batch = [
                (name, sessions) for name in names[begin : begin + AT_ONCE] if (sessions := ledger.sessions_of(name))
            ]
            taken = await gather_limited(self._publish(*entry) for entry in batch)
            accepted = {name for (name, _), is_taken in zip(batch, taken, strict=True) if is_taken}
            self._submitted |= dict.fromkeys(accepted, now)
            for name in names[begin : begin + AT_ONCE]:
                if name in accepted or not ledger.sessions_of(name):
                    self._waiting.pop(name, None)
            if not all(taken):
                self._retry_at = now + FULL_SECONDS
                return

    async def _publish(self, submission: str, sessions: Sequence[Session]) -> bool:
        """Publish the task of some sessions to the explorer; return False if the queue did not accept it.

        The explorer accepts a submission only once. ``sessions`` is empty for a task whose outcome has arrived.
        """
        if not sessions:
            return True
        try:
            task = task_of(sessions, self._config)
        except NotAllowed as error:
            await self._failed(submission, "not-allowed", str(error))
            return True
        message = TaskSubmission(task=task, submission_id=submission, exact_runs=True)
        outside = next((session.traceparent for session in sessions if session.traceparent), "")
        try:
            made = envelope(
                message,
                message_id=submission,
                headers={TRACEPARENT: outside} if outside else None,
                reply_to=self._topology.sessions.name,
                correlation_id=submission,
            )
            if len(encode(message.task)) > (limit := self._config.broker.max_task_bytes):
                raise MessageTooLarge(
                    f"its answers take more than the {limit} bytes of a task (broker.max_message_bytes)"
                )
            await self._bus.publish_declared(self._topology.submitted, BY_GATEWAY, made, timeout=SUBMIT_WITHIN)
        except MessageTooLarge as error:
            await self._failed(submission, "too-large", str(error))
        except ContentError as error:
            await self._failed(submission, "unfit", str(error))
        except BusUnavailable as error:
            if not self._bus.usable:
                raise
            log.warning("submission_delayed", submission=submission, reason=str(error))
            return False
        return True

    async def _failed(self, submission: str, why: str, reason: str) -> None:
        """Publish on the stream that the sessions of a submission cannot become a task."""
        failed = SubmissionOutcome(submission_id=submission, batch="", ticket="", outcome="failed", message=reason)
        await self._store.publish(failed, f"{why}-{submission}")


async def gather_limited(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Await all work, :data:`AT_ONCE` coroutines at a time, and return the results; raise the first error unwrapped."""
    waiting, results = list(work), list[T]()
    try:
        while waiting:
            running, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(coroutine) for coroutine in running]
            results += [task.result() for task in tasks]
    except ExceptionGroup as errors:
        raise first_leaf(errors) from None
    finally:
        for coroutine in waiting:
            coroutine.close()
    return results


def task_of(sessions: Sequence[Session], config: Config) -> TaskBody:
    """Return the task of some sessions: their recorded answers, or a replay of the first session's request.

    Raises:
        NotAllowed: The replay uses a name or a setting that ``outsiders`` does not allow.
    """
    first = sessions[0]
    if first.replay is not None:
        return _replay(first, config)
    record = [
        {
            "id": session.id,
            "calls": [encode(call) for call in session.calls.values()],
            "reward": session.reward,
            "call_rewards": [[call, choice, reward] for (call, choice), reward in session.call_rewards.items()],
            "metrics": session.metrics,
            "labels": {} if session.opened is None else session.opened.labels,
        }
        for session in sessions
    ]
    gateway = config.gateway
    raw_task = {"sessions": record, "merge": gateway.merge, "turn_discount": gateway.turn_discount}
    return TaskBody(workflow=RECORDED_SESSIONS, raw_task=raw_task, repeat_times=len(sessions))


def _replay(session: Session, config: Config) -> TaskBody:
    replay = session.replay
    assert replay is not None
    taskset = config.buffer.training_tasksets[0]
    request = next((call.request for call in session.calls.values() if call.request), {})
    messages = request.get("messages")
    asked = [
        message
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    question = asked[-1].get("content") if asked else request.get("prompt", "")
    task = {} if session.opened is None else session.opened.task
    asked_for = {name: request[name] for name in REPLAYED if name in request}
    body = TaskBody(
        workflow=replay.workflow,
        workflow_args=replay.workflow_args,
        raw_task={taskset.format.prompt_key: question, **asked_for, **task},
        repeat_times=replay.runs,
    )
    return restrict_task(config, body)
