"""The duties that one gateway of a run has for all: deciding about sessions that are over, and making tasks of them.

It may be killed anywhere: each publish has an id that follows from what it is about, and whoever acts next publishes
again what has had no effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import structlog

from trinity_agents.gateway.stream_book import AT, EVENT, ORIGIN, StreamBook
from trinity_mq.bus import Bus, BusUnavailable, Incoming, MessageTooLarge, StreamCut, Topology
from trinity_mq.bus.topology import BY_GATEWAY
from trinity_mq.config import Config
from trinity_mq.gateway.book import BookUnavailable
from trinity_mq.gateway.recorded_call import RECORDED_SESSIONS
from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import (
    DecodeError,
    Progress,
    SessionEnd,
    SessionRefused,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
    TaskBody,
    TaskSubmission,
    decode,
    encode,
)
from trinity_mq.rewards.outsiders import NotAllowed, allowed_task
from trinity_mq.runtime.deliveries import dead_letter, envelope
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.telemetry.trace_ids import TRACEPARENT

log = structlog.get_logger(__name__)

TICK = 1.0
"""Seconds between two looks at limits of time."""
MIN_GAP = 0.05
"""Least seconds between two looks: sessions change hundreds of times a second, and each look is at all of them."""
REPLAYED = ("messages", "tools", "prompt")
"""Parts of a session's first request that the record of its replay has."""
AT_ONCE = 64
"""Publishes under way at a time."""
RESUBMIT_SECONDS = 600.0
"""Seconds after which a task whose outcome has not come is submitted once more; the explorer knows those it has."""


class Acting:
    """The acting gateway.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: The run's names.
        book: The sessions.
        agent_id: Id of the gateway.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        bus: Bus,
        topology: Topology,
        book: StreamBook,
        *,
        agent_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._bus, self._topology, self._book = config, bus, topology, book
        self._id, self._clock = agent_id, clock
        self._submitted: dict[str, float] = {}
        """Loop times of submissions by id."""
        self._looked = 0
        """Position at which was last looked for sessions to be published again."""

    async def run(self) -> None:
        """Act until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide(), name="decide")
            group.create_task(self._follow_results(), name="follow results")

    # -- deciding

    async def _decide(self) -> None:
        book = self._book
        while True:
            await self._through_outages(self.once)
            await asyncio.sleep(MIN_GAP)
            await book.changed.wait(TICK)

    async def _through_outages(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work, again after an outage that cut it off: the gateway answers agents meanwhile."""
        while True:
            try:
                return await work()
            except (BookUnavailable, BusUnavailable) as error:
                log.warning("acting_waits", agent=self._id, reason=str(error))
                await self._bus.wait_usable()

    async def once(self) -> None:
        """Do what is due now."""
        await self._refuse()
        due = self._book.ledger.due(self._clock())
        await _all(self._book.say(event, _id_of(event)) for event in due)
        queued = self._book.ledger.queued()
        await _all(self._submit(*one) for one in queued)
        self._submitted = {name: self._submitted[name] for name, _ in queued if name in self._submitted}
        await self._carry()

    async def _refuse(self) -> None:
        """Dead-letter what no session takes, and say so on the stream, for whoever reads it anew."""
        unreadable, self._book.unreadable = self._book.unreadable, []
        for one in unreadable:
            await self._refused(one.offset, one.delivery, f"does not decode: {one.reason}")
        for event in self._book.ledger.take_unknown():
            reason = f"no session {getattr(event.body, 'session', '')!r} is known; POST /sessions makes one"
            await self._refused(event.origin, _incoming(event, self._topology), reason)

    async def _refused(self, offset: int, what: Incoming, reason: str) -> None:
        await dead_letter(self._bus, self._topology, what, reason, self._id)
        await self._book.publish(SessionRefused(offset=offset, reason=reason), f"refused-{offset}")

    async def _submit(self, submission: str, sessions: Sequence[Session]) -> None:
        """Hand the task of some sessions to the explorer, which takes it once."""
        now = asyncio.get_running_loop().time()
        if now - self._submitted.get(submission, -RESUBMIT_SECONDS) < RESUBMIT_SECONDS:
            return
        try:
            task = task_of(sessions, self._config)
        except NotAllowed as error:
            await self._failed(submission, "not-allowed", str(error))
            self._submitted[submission] = now
            return
        message = TaskSubmission(task=task, submission_id=submission, exact_runs=True)
        outside = next((session.traceparent for session in sessions if session.traceparent), "")
        made = envelope(
            message,
            message_id=submission,
            headers={TRACEPARENT: outside} if outside else None,
            reply_to=self._topology.sessions.name,
            correlation_id=submission,
        )
        try:
            if len(encode(message.task)) > (limit := self._config.broker.max_task_bytes):
                raise MessageTooLarge(
                    f"its answers take more than the {limit} bytes of a task (broker.max_message_bytes)"
                )
            if not await self._bus.publish(self._topology.exchange("tasks"), BY_GATEWAY, made):
                await self._bus.declare(self._topology.submitted)
                return
        except MessageTooLarge as error:
            await self._failed(submission, "too-large", str(error))
        self._submitted[submission] = now

    async def _failed(self, submission: str, why: str, reason: str) -> None:
        """Say on the stream that sessions cannot become a task."""
        failed = SubmissionOutcome(submission_id=submission, batch="", ticket="", outcome="failed", message=reason)
        await self._book.publish(failed, f"{why}-{submission}")

    async def _carry(self) -> None:
        """Publish the events of sessions again that retention would cut before they are settled."""
        kept = self._topology.sessions_max_bytes
        if self._book.position - self._looked < kept // 8:
            return
        self._looked = self._book.position
        # of all that is kept: a quarter until an event is due, an eighth until it is looked at, a quarter of others
        # that go first (gateway.max_kept_bytes); the broker cuts segments of at most a quarter
        for session in self._book.ledger.to_carry(self._looked - kept // 4):
            log.info("session_carried", session=session.id, events=len(session.events), bytes=session.size)
            for event in list(session.events):
                headers: dict[str, str | int | float | bool] = {ORIGIN: event.origin, AT: event.at}
                await self._book.publish(event.body, event.message_id, headers, at=event.at)

    # -- what became of batches

    async def _follow_results(self) -> None:
        """Tell the sessions' stream what the trainer made of each batch."""
        offset = self._book.ledger.results_offset
        while True:
            try:
                async with await self._bus.consume(self._topology.results, offset=offset) as feed:
                    async for delivery in feed:
                        offset = (delivery.offset or 0) + 1
                        if delivery.kind == Progress.kind and not self._bus.is_foreign(delivery):
                            await self._progressed(delivery.body, delivery.content_type, offset)
                    return
            except StreamCut as cut:
                offset = cut.got

    async def _progressed(self, body: bytes, content_type: str | None, offset: int) -> None:
        try:
            progress = decode(body, Progress, content_type)
        except DecodeError as error:
            log.warning("undecodable", queue=self._topology.results.name, reason=str(error))
            return
        trained = SessionsTrained(
            ticket=progress.ticket,
            outcome=progress.outcome,
            generation=progress.generation,
            step=progress.step,
            reason=progress.reason or "",
            offset=offset,
        )
        name = f"trained-{progress.ticket}-{progress.generation}-{progress.step}"
        await self._through_outages(lambda: self._book.publish(trained, name))


async def _all(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Await all work, :data:`AT_ONCE` at a time. The first error ends it, as it is."""
    waiting = list(work)
    try:
        while waiting:
            now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            async with asyncio.TaskGroup() as group:
                for one in now:
                    group.create_task(one)
    except ExceptionGroup as errors:
        raise first_leaf(errors) from None
    finally:
        for one in waiting:
            one.close()


def task_of(sessions: Sequence[Session], config: Config) -> TaskBody:
    """Return the task that some sessions become: their recorded answers, or the replay of the first request.

    Raises:
        NotAllowed: The replay names or sets something that ``outsiders`` does not open.
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
    asked = [message for message in request.get("messages") or () if message.get("role") == "user"]
    question = asked[-1].get("content") if asked else request.get("prompt", "")
    task = {} if session.opened is None else session.opened.task
    asked_for = {name: request[name] for name in REPLAYED if name in request}
    body = TaskBody(
        workflow=replay.workflow,
        workflow_args=replay.workflow_args,
        raw_task={taskset.format.prompt_key: question, **asked_for, **task},
        repeat_times=replay.runs,
    )
    return allowed_task(config, body)


def _id_of(event: SessionsDecided | SessionEnd) -> str:
    if isinstance(event, SessionEnd):
        return f"end-{event.session}-idle"
    return f"decided-{event.submission or event.sessions[0]}"


def _incoming(event: Event, topology: Topology) -> Incoming:
    body = event.body
    return Incoming(
        body=encode(body),
        exchange=topology.exchange("sessions"),
        routing_key=EVENT,
        queue=topology.sessions.name,
        message_id=event.message_id,
        content_type="application/msgpack",
        headers={"kind": body.kind},
    )
