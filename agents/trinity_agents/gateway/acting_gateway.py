"""Duties of the run's single acting gateway: decides about ended sessions, and turns them into tasks.

The acting gateway may be killed at any point: each message has an id derived from its content, and the next acting
gateway publishes again all messages that had no effect. :class:`Submissions` submits a task again only if the depth of
the queue shows that its message may be lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

import structlog

from trinity_agents.gateway.session_stream import EVENT, OUTSIDE, SessionStream
from trinity_mq.bus import Bus, BusUnavailable, Delivery, Incoming, MessageTooLarge, StreamCut, Topology
from trinity_mq.bus.topology import BY_GATEWAY
from trinity_mq.config import Config
from trinity_mq.gateway.ledger import Ledger
from trinity_mq.gateway.recorded_call import RECORDED_SESSIONS
from trinity_mq.gateway.session import Event, Session
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import (
    ContentError,
    Progress,
    SessionEnd,
    SessionRefused,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
    TaskBody,
    TaskSubmission,
    encode,
)
from trinity_mq.rewards.outsiders import NotAllowed, restrict_task
from trinity_mq.runtime.deliveries import dead_letter, decode_or_dead_letter, envelope
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.telemetry.trace_ids import TRACEPARENT

__all__ = ["ActingGateway", "task_of"]

log = structlog.get_logger(__name__)

TICK = 1.0
"""Maximum seconds between two checks of the sessions' time limits."""
MIN_GAP = 0.05
"""Minimum seconds between two checks: sessions change hundreds of times a second, and a check covers all sessions."""
LONGEST_STEP = 10.0
"""Maximum seconds between two readings of the clock. After a longer gap, the process counts as suspended, and the gap
does not count for time limits.
"""
TELL_SECONDS = 30.0
"""Seconds between two published time marks. The time from the latest event on the stream to the start of the next
acting gateway does not count for session time limits; the marks keep this uncounted time short."""
TOLD_PAUSE = 1.0
"""If session time limits were paused for this many seconds since the last time mark, the next mark is published at
once."""

T = TypeVar("T")
REPLAYED = ("messages", "tools", "prompt")
"""Fields of a session's first request that are copied into the task of its replay."""
MOST_REASON = 1000
"""Maximum characters of the reason of a refusal, which may quote any text of the message."""
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


class ActingGateway:
    """Decides about ended sessions, submits them as tasks and publishes their outcomes, as the run's acting gateway.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: Names of the run's queues and exchanges.
        store: The sessions.
        agent_id: Id of the gateway.
        clock: Returns seconds since the epoch.
        may_act: Returns whether this gateway still holds the lock, as far as it knows.
    """

    def __init__(
        self,
        config: Config,
        bus: Bus,
        topology: Topology,
        store: SessionStream,
        *,
        agent_id: str,
        clock: Callable[[], float] = time.time,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config, self._bus, self._topology, self._store = config, bus, topology, store
        self._id, self._clock, self._may_act = agent_id, clock, may_act
        self._submissions = Submissions(config, bus, topology, store)
        self._checked_position = 0
        """Position in the stream, in bytes, at the last check for sessions to republish."""
        self._clock_read_at = clock()
        """Time of the last reading of the clock."""
        self._was_usable = bus.usable
        self._last_mark: tuple[float, float] | None = None
        """(time, paused seconds) of the last published mark, None before the first mark."""

    async def run(self) -> None:
        """Act for the run until cancelled. The caller holds the lock."""
        if self._store.time:  # no gateway was acting since the latest event
            self._store.paused += max(0.0, self._clock() - self._store.time)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide(), name="decide")
            group.create_task(self._follow_results(), name="follow results")

    # -- decisions about sessions

    async def _decide(self) -> None:
        store = self._store
        while True:
            await self._retry_after_outages(self.once)
            await asyncio.sleep(MIN_GAP)
            await store.changed.wait(TICK)

    async def _retry_after_outages(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work()``, and repeat it after an outage of the broker that interrupted it; the gateway keeps serving
        agents.
        """
        while True:
            try:
                return await work()
            except (SessionsUnavailable, BusUnavailable) as error:
                log.warning("acting_gateway_waits", agent=self._id, reason=str(error))
                await self._bus.wait_usable()

    async def once(self) -> None:
        """Publish all messages that are due now: time marks, refusals, ends of idle sessions, decisions, copies of
        sessions that retention would remove, and submissions. Publish nothing until the stream has been read, and while
        the broker is unavailable.
        """
        self._count_time()
        if not (self._store.is_ready() and self._bus.usable):
            return
        await self._publish_time_mark()
        await self._refuse()
        due = self._store.ledger.due(self._store.now())
        await gather_limited(self._store.report(event, _id_of(event)) for event in due)
        await self._carry()
        await self._submissions.submit()

    # -- time limits of sessions

    def _count_time(self) -> None:
        """Pause session time limits while the broker is unavailable or this process is suspended."""
        now, is_usable = self._clock(), self._bus.usable
        step = max(0.0, now - self._clock_read_at)
        if step > LONGEST_STEP or not (is_usable and self._was_usable):
            self._store.paused += step
        self._clock_read_at, self._was_usable = now, is_usable

    async def _publish_time_mark(self) -> None:
        now, paused = self._clock(), self._store.paused
        if self._last_mark is not None:
            marked_at, marked_pause = self._last_mark
            is_news = paused - marked_pause >= TOLD_PAUSE
            if not is_news and (not self._store.ledger.live or now - marked_at < TELL_SECONDS):
                return
        await self._store.publish_time_mark()
        self._last_mark = (now, paused)

    # -- refused messages

    async def _refuse(self) -> None:
        """Dead-letter messages that no session takes, and record the refusals on the stream for later readers."""
        not_taken = self._store.not_taken
        await gather_limited(
            self._refused(offset, message.delivery, message.reason) for offset, message in not_taken.items()
        )
        await gather_limited(self._refuse_unknown(event) for event in self._store.ledger.unknown_events())

    async def _refuse_unknown(self, event: Event) -> None:
        reason = f"no session {getattr(event.body, 'session', '')!r} is known; POST /sessions opens a session"
        await self._refused(event.origin, _incoming(event, self._topology), reason)

    async def _refused(self, offset: int, what: Incoming, reason: str) -> None:
        reason = reason[:MOST_REASON]
        await dead_letter(self._bus, self._topology, what, reason, self._id)
        refused = SessionRefused(offset=offset, reason=reason)
        await self._store.publish(refused, f"refused-{offset}")
        self._store.apply_refused(refused)

    # -- sessions that retention would remove

    async def _carry(self) -> None:
        """Publish again the events of sessions that retention would remove before the sessions are settled. This is
        checked once for each eighth of the retained bytes that the stream has grown.
        """
        retained_bytes = self._topology.sessions_max_bytes
        if self._store.position - self._checked_position < retained_bytes // 8:
            return
        # Sessions that another gateway settled, for example while this process was suspended, must not be carried.
        await self._store.catch_up()
        if not self._may_act():
            return
        position = self._store.position
        # An event is carried once 1/4 of the retained bytes follow it. Up to 1/8 more may follow it until the next
        # check, and 1/4 while other sessions are carried first (gateway.max_kept_bytes). The broker removes segments of
        # at most 1/4, so the event is still there.
        carried = self._store.ledger.to_carry(position - retained_bytes // 4)
        for session in carried:  # also if it was settled since
            log.info("session_republished", session=session.id, events=len(session.events), bytes=session.size)
            # Outcomes come first: a session whose events were copied before an outage is not carried again after it.
            if (outcome := session.batch) is not None:
                await self._store.publish(outcome, f"outcome-{outcome.submission_id}")
            if (trained := session.trained) is not None:
                await self._store.publish(trained, _trained_id(trained))
            for event in list(session.events):
                await self._store.republish(event)
        self._checked_position = position

    # -- outcomes of batches

    async def _follow_results(self) -> None:
        """Publish the trainer's outcome of each batch on the sessions' stream, until cancelled."""
        offset = self._store.ledger.results_offset
        while True:
            try:
                async with await self._bus.consume(self._topology.results, offset=offset) as feed:
                    async for delivery in feed:
                        offset = (delivery.offset or 0) + 1
                        if delivery.kind == Progress.kind and not self._bus.is_foreign(delivery):
                            await self._progressed(delivery, offset)
                    return
            except StreamCut as cut:
                offset = cut.got

    async def _progressed(self, delivery: Delivery, offset: int) -> None:
        progress = await decode_or_dead_letter(
            self._bus, self._topology, delivery, self._id, expect=Progress, quiet=True
        )
        if not isinstance(progress, Progress):
            return
        trained = SessionsTrained(
            ticket=progress.ticket,
            outcome=progress.outcome,
            generation=progress.generation,
            step=progress.step,
            reason=progress.reason or "",
            offset=offset,
        )
        await self._retry_after_outages(lambda: self._store.publish(trained, _trained_id(trained)))


def _id_of(event: SessionsDecided | SessionEnd) -> str:
    if isinstance(event, SessionEnd):
        return f"end-{event.session}-idle"
    return f"decided-{event.submission or event.sessions[0]}"


def _trained_id(trained: SessionsTrained) -> str:
    return f"trained-{trained.ticket}-{trained.generation}-{trained.step}"


def _incoming(event: Event, topology: Topology) -> Incoming:
    body = event.body
    return Incoming(
        body=encode(body),
        exchange=topology.exchange("sessions"),
        routing_key=OUTSIDE if event.outside else EVENT,
        queue=topology.sessions.name,
        message_id=event.message_id,
        content_type="application/msgpack",
        headers={"kind": body.kind},
    )


class Submissions:
    """Submits the tasks of the acting gateway to the explorer's queue.

    A new acting gateway cannot know which of the waiting tasks were submitted. The number of tasks that it submits
    again is the number of waiting tasks minus the number of messages in the queue. The queue, which also holds the
    submissions of other programs, then never holds more messages than tasks wait.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: Names of the run's queues and exchanges.
        store: The sessions.
    """

    def __init__(self, config: Config, bus: Bus, topology: Topology, store: SessionStream) -> None:
        self._config, self._bus, self._topology, self._store = config, bus, topology, store
        self._ledger: Ledger | None = None
        self._waiting: dict[str, None] = {}
        """Ids of submissions to publish, in order."""
        self._submitted: dict[str, float] = {}
        """Event loop time of each submission by id. For submissions of earlier gateways it is the time at which this
        gateway found them.
        """
        self._checked = self._retry_at = float("-inf")

    async def submit(self) -> None:
        """Submit new tasks, and submit again the tasks whose message may be lost."""
        now = asyncio.get_running_loop().time()
        ledger = self._store.ledger
        if ledger is not self._ledger:  # at the start, and after the ledger was rebuilt
            ledger.take_new_tasks()
            earlier = [name for name, _ in ledger.queued() if name not in self._submitted]
            await self._resubmit(earlier[::-1], now)  # newest first: an earlier gateway may have ended before them
            self._ledger = ledger  # after an outage in the line above, the next call repeats it
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
        """Schedule the first submissions of ``names`` for another publication: as many as messages must have been lost.
        All of ``names`` count as submitted now.
        """
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

        Return True also without a publish: ``sessions`` is empty for a task whose outcome has arrived, and sessions
        that cannot become a task get the outcome *failed*. The explorer accepts a submission only once.
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
            "lineage_rewards": session.lineage_rewards,
            "metrics": session.metrics,
            "labels": {} if session.opened is None else session.opened.labels,
        }
        for session in sessions
    ]
    gateway = config.gateway
    raw_task = {
        "sessions": record,
        "merge": gateway.merge,
        "turn_discount": gateway.turn_discount,
        "shared_prefix": gateway.shared_prefix,
    }
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
