"""Duties of the run's single acting gateway: decides about ended sessions, and turns them into tasks.

The acting gateway may be killed at any point: each message has an id derived from its content, and the next acting
gateway publishes again all messages that had no effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from trinity_agents.gateway.session_stream import EVENT, OUTSIDE, SessionStream
from trinity_agents.gateway.submissions import Submissions, gather_limited, task_of
from trinity_mq.bus import Bus, BusUnavailable, Delivery, Incoming, StreamCut, Topology
from trinity_mq.config import Config
from trinity_mq.gateway.session import Event
from trinity_mq.gateway.session_store import SessionsUnavailable
from trinity_mq.messages import (
    Progress,
    SessionEnd,
    SessionRefused,
    SessionsDecided,
    SessionsTrained,
    encode,
)
from trinity_mq.runtime.deliveries import dead_letter, decode_or_dead_letter

__all__ = ["ActingGateway", "task_of"]

log = structlog.get_logger(__name__)

TICK = 1.0
"""Maximum seconds between two checks of the sessions' time limits."""
MIN_GAP = 0.05
"""Minimum seconds between two checks: sessions change hundreds of times a second, and a check covers all sessions."""
LONGEST_STEP = 10.0
"""Seconds between two readings of the clock above which the process counts as suspended, which pauses time limits."""
TELL_SECONDS = 30.0
"""Seconds between two published marks of the time up to which session time limits have run. The time between the last
mark and the next start of a gateway does not count."""
TOLD_PAUSE = 1.0
"""Unpublished pause in seconds from which a mark is published at once."""


class ActingGateway:
    """The acting gateway's work.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: The run's names.
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
        """Position in bytes of the last check for sessions to carry."""
        self._clock_read_at = clock()
        """Time of the last reading of the clock."""
        self._was_usable = bus.usable
        self._last_mark: tuple[float, float] | None = None
        """(time, paused seconds) of the last published mark, None before the first mark."""

    async def run(self) -> None:
        """Act until cancelled."""
        if self._store.time:  # no gateway was acting since the latest event
            self._store.paused += max(0.0, self._clock() - self._store.time)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide(), name="decide")
            group.create_task(self._follow_results(), name="follow results")

    # -- deciding

    async def _decide(self) -> None:
        store = self._store
        while True:
            await self._retry_after_outages(self.once)
            await asyncio.sleep(MIN_GAP)
            await store.changed.wait(TICK)

    async def _retry_after_outages(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work, and repeat it after an outage that interrupted it; the gateway keeps serving agents."""
        while True:
            try:
                return await work()
            except (SessionsUnavailable, BusUnavailable) as error:
                log.warning("acting_gateway_waits", agent=self._id, reason=str(error))
                await self._bus.wait_usable()

    async def once(self) -> None:
        """Publish everything that is due now: time marks, refusals, decisions, carried sessions and submissions."""
        self._count_time()
        if not (self._store.is_ready() and self._bus.usable):
            return
        await self._publish_time_mark()
        await self._refuse()
        due = self._store.ledger.due(self._store.now())
        await gather_limited(self._store.report(event, _id_of(event)) for event in due)
        await self._carry()
        await self._submissions.submit()

    # -- time

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
        not_taken, self._store.not_taken = self._store.not_taken, []
        for message in not_taken:
            await self._refused(message.offset, message.delivery, message.reason)
        for event in self._store.ledger.take_unknown():
            reason = f"no session {getattr(event.body, 'session', '')!r} is known; POST /sessions opens a session"
            await self._refused(event.origin, _incoming(event, self._topology), reason)

    async def _refused(self, offset: int, what: Incoming, reason: str) -> None:
        await dead_letter(self._bus, self._topology, what, reason, self._id)
        await self._store.publish(SessionRefused(offset=offset, reason=reason), f"refused-{offset}")

    # -- retention

    async def _carry(self) -> None:
        """Publish again the events of sessions that retention would remove before the sessions are settled."""
        retained_bytes = self._topology.sessions_max_bytes
        if self._store.position - self._checked_position < retained_bytes // 8:
            return
        # Sessions that another gateway settled, for example while this process was suspended, must not be carried.
        await self._store.catch_up()
        if not self._may_act():
            return
        self._checked_position = self._store.position
        # Shares of the retained bytes: 1/4 until an event is due, 1/8 until the next check, 1/4 for other sessions that
        # are carried first (gateway.max_kept_bytes). The broker removes segments of at most 1/4.
        carried = self._store.ledger.to_carry(self._checked_position - retained_bytes // 4)
        for session in carried:
            log.info("session_republished", session=session.id, events=len(session.events), bytes=session.size)
            for event in list(session.events):
                await self._store.republish(event)
        outcomes = {session.batch.submission_id: session.batch for session in carried if session.batch is not None}
        for submission, outcome in outcomes.items():
            await self._store.publish(outcome, f"outcome-{submission}")
        trained = {session.trained.ticket: session.trained for session in carried if session.trained is not None}
        for trained_event in trained.values():  # these sessions may have been settled in the meantime
            await self._store.publish(trained_event, _trained_id(trained_event))

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
