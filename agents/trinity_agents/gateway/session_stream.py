"""Sessions on the stream ``tmq.<run>.sessions``: publishes events, and reads all events into the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, Delivery, Envelope, MessageTooLarge, StreamCut, Topology
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.gateway.ledger import Ledger
from trinity_mq.gateway.rules import report_problem
from trinity_mq.gateway.session import Event, Session
from trinity_mq.gateway.session_store import EventTooLarge, OutsideEvent, SessionsUnavailable
from trinity_mq.messages import (
    ContentError,
    DecodeError,
    Mark,
    Message,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionRefused,
    SessionReward,
    SessionsCommitted,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
)
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import dead_letter_reason
from trinity_mq.transport.event_log import EventEffect, EventLog, Kinds

log = structlog.get_logger(__name__)
T = TypeVar("T")

EVENT, OUTSIDE, OUTCOME = "event", "session", "outcome"
"""Routing keys: events of gateways, rewards and ends by other programs, outcomes of submitted tasks."""
ORIGIN, AT, AT_MS = "origin", "at", "at-ms"
"""Headers of gateway events: the stream offset of an event's first copy, and the event's time since the epoch in whole
seconds and in milliseconds. Release 0.1.0 reads only the seconds. Integers are used, because AMQP would carry a float
in 32 bits."""
BY = "by"
"""Header of an event that a gateway published again: the routing key of its first copy, if an outsider sent it."""
PAUSED_MS = "paused-ms"
"""Header of gateway events: total milliseconds for which session time limits were paused since the run began."""
FROM_OUTSIDE = (SessionReward, SessionEnd)
KINDS: Kinds = {
    OUTSIDE: {kind.kind: kind for kind in FROM_OUTSIDE},
    OUTCOME: {SubmissionOutcome.kind: SubmissionOutcome},
    EVENT: {
        kind.kind: kind
        for kind in (
            *FROM_OUTSIDE,
            SessionOpened,
            SessionCall,
            SessionsCommitted,
            SessionsDecided,
            SessionsTrained,
            SessionRefused,
            SubmissionOutcome,
            Mark,
        )
    },
}
"""Allowed message kinds by routing key: a program with reward rights can neither open a session nor decide about it."""
KNOWN_WITHIN = 2.0
"""Maximum seconds to wait for a session that was just opened at another gateway."""
STORED_WITHIN = 30.0
"""Maximum seconds to wait for the effect of a published event."""
MOST_UNCONFIRMED = 64 * 1024**2
"""Maximum bytes of answers that wait for the broker's confirm; further answers are reported as not recorded."""
PUBLISH_COST = 4096
"""Bytes of memory that a waiting publish takes in addition to its body."""


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message on the stream that is not an event, or an outsider's event that its session refused."""

    delivery: Delivery
    reason: str


class SessionStream(EventLog):
    """Stores sessions as events on the stream, for one gateway: implements
    :class:`trinity_mq.gateway.session_store.SessionStore`.

    Args:
        bus: A connected bus that knows its run.
        topology: Names of the run's queues and exchanges.
        record_timeout: Maximum seconds to wait for the confirm of an answer.
        tasks: Task group of publishes, which continue after the caller has stopped waiting.
        clock: Returns seconds since the epoch.
        most_unconfirmed: Maximum bytes of answers that wait for the broker's confirm.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        *,
        record_timeout: float,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float] = time.time,
        most_unconfirmed: int = MOST_UNCONFIRMED,
    ) -> None:
        super().__init__(bus, topology.sessions, KINDS, EVENT)
        self.ledger = Ledger()
        self.not_taken: dict[int, RefusedMessage] = {}
        """Messages for the acting gateway to dead-letter, by their offset on the stream."""
        self.paused = 0.0
        """Seconds for which session time limits were paused, because agents could not have met the limits."""
        self.time = 0.0
        """Time of the latest event in seconds since the epoch, 0 before the first event."""
        self._clock, self._tasks, self._record_timeout = clock, tasks, record_timeout
        self._most_unconfirmed, self._unconfirmed = most_unconfirmed, 0
        self._earlier: dict[str, Session] = {}
        """Sessions of the previous ledgers, kept until the stream has been read again."""

    def now(self) -> float:
        """Return the time for session time limits: seconds since the epoch minus the paused seconds."""
        return self._clock() - self.paused

    # -- publishing events

    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        if at_once and not self._bus.usable:
            raise SessionsUnavailable(self._refusal)
        await self._store(opened, f"opened-{opened.session}")

    async def find(self, session: str) -> Session | None:
        return await self._find(lambda: self.ledger.get(session))

    async def find_key(self, key_hash: str) -> Session | None:
        return await self._find(lambda: self.ledger.of_key(key_hash))

    async def find_call(self, session: str, call: str) -> SessionCall | None:
        return await self._find(lambda: self.ledger.call(session, call))

    async def _find(self, look: Callable[[], T | None]) -> T | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN):
                await self.changed.until(lambda: look() is not None)
        return look()

    async def record(self, call: SessionCall) -> bool:
        try:
            message = envelope(call, message_id=call.message_id, headers=self._stamps())
        except ContentError as error:
            return _not_recorded(call, str(error))
        cost = len(message.body) + PUBLISH_COST
        if self._unconfirmed + cost > self._most_unconfirmed:
            return _not_recorded(call, f"{self._unconfirmed} bytes of answers wait for the broker already")
        publish = self._publish_call(call.session, call.call, message)
        try:
            publishing = self._tasks.create_task(publish, name="record call")
        except RuntimeError:  # the task group is being cancelled
            publish.close()
            return _not_recorded(call, "the gateway is ending")
        self._unconfirmed += cost
        publishing.add_done_callback(lambda _: self._confirmed(cost))
        del call  # only the encoded body stays in memory while the publish waits
        # An unavailable broker will not confirm in time, so the timeout is then 0.
        done, _ = await asyncio.wait([publishing], timeout=self._record_timeout if self._bus.usable else 0.0)
        return bool(done) and publishing.result()

    def _confirmed(self, cost: int) -> None:
        self._unconfirmed -= cost

    async def report(self, event: OutsideEvent | SessionsDecided, message_id: str) -> EventEffect:
        return await self._store(event, message_id)

    async def catch_up(self) -> None:
        """Wait until all present messages of the stream have been read.

        Raises:
            SessionsUnavailable: The messages were not read in time.
        """
        mark = Mark(nonce=uuid.uuid4().hex)
        await self._store(mark, f"mark-{mark.nonce}")

    async def publish_time_mark(self) -> None:
        """Publish a mark with the current time and the paused seconds; raises the errors of :meth:`publish`."""
        mark = Mark(nonce=uuid.uuid4().hex)
        await self.publish(mark, f"time-{mark.nonce}")

    async def publish(
        self,
        message: Message,
        message_id: str,
        headers: dict[str, HeaderValue] | None = None,
        *,
        at: float | None = None,
    ) -> None:
        """Publish an event and wait for its confirm.

        Args:
            message: The event.
            message_id: Id of the message.
            headers: Headers in addition to the time and the paused seconds.
            at: Time of the event in seconds since the epoch. None: now.

        Raises:
            BusUnavailable: The event was not confirmed in time.
            MessageTooLarge: The event is too large.
            ContentError: The event holds a value that cannot be encoded.
        """
        stamped = {**self._stamps(at), **(headers or {})}
        await self._bus.publish_declared(self._stream, EVENT, envelope(message, message_id=message_id, headers=stamped))

    def apply_refused(self, refused: SessionRefused) -> None:
        """Forget a refused message: no gateway dead-letters it again."""
        self.ledger.apply_refused(refused)
        self.not_taken.pop(refused.offset, None)

    async def republish(self, event: Event) -> None:
        """Publish a copy of an event that retention is about to remove; raises the errors of :meth:`publish`, except
        ContentError and MessageTooLarge: such a copy is left out, with a warning.

        The time includes the pauses, so that release 0.1.0, which does not know pauses, sees the same session age.
        """
        headers: dict[str, HeaderValue] = {ORIGIN: event.origin}
        if event.outside:
            headers[BY] = OUTSIDE
        try:
            await self.publish(event.body, event.message_id, headers, at=event.at + self.paused)
        except (ContentError, MessageTooLarge) as error:  # the copy has all optional fields, or the limit was lowered
            log.warning("event_not_republished", message_id=event.message_id, reason=str(error))

    def _stamps(self, at: float | None = None) -> dict[str, HeaderValue]:
        at = self._clock() if at is None else at
        return {AT: round(at), AT_MS: round(at * 1000), PAUSED_MS: round(self.paused * 1000)}

    async def _publish_call(self, session: str, call: str, message: Envelope) -> bool:
        try:
            await self._bus.publish_declared(self._stream, EVENT, message)
        except (BusError, ValueError) as error:
            log.warning("call_not_recorded", session=session, call=call, reason=str(error))
            return False
        return True

    async def _store(self, message: Message, message_id: str) -> EventEffect:
        """Publish an event and return its effect after it was read back from the stream.

        Raises:
            SessionsUnavailable: The broker is unavailable, or the event was not read back in time.
            EventTooLarge: The event is too large.
        """
        if not self._bus.usable:
            await self._wait_for_broker()
        try:
            stamped = envelope(message, message_id=message_id, headers=self._stamps())
            return await self._publish_and_read_back(EVENT, stamped, STORED_WITHIN)
        except MessageTooLarge as error:
            raise EventTooLarge(str(error)) from error
        except BusUnavailable as error:
            raise SessionsUnavailable(str(error)) from error

    async def _wait_for_broker(self) -> None:
        """Wait up to ``record_timeout`` seconds for an unavailable broker.

        Raises:
            SessionsUnavailable: The broker stays unavailable.
        """
        try:
            async with asyncio.timeout(self._record_timeout):
                await self._bus.wait_usable()
        except (TimeoutError, BusUnavailable):
            raise SessionsUnavailable(self._refusal) from None

    @property
    def _refusal(self) -> str:
        return f"the broker is not available: {self._bus.trouble or 'it was away for a moment'}; retry later"

    # -- reading events

    def _begin_after(self, cut: StreamCut) -> None:
        """Forget all sessions, because the fate of the sessions whose events were removed is unknown.

        Waiting callers are answered when their event is read; if it was removed, their wait times out and they retry.
        """
        log.info("sessions_truncated", asked=cut.asked, got=cut.got)
        self._earlier |= {session.id: session for session in self.ledger}
        self.ledger = Ledger()
        self.not_taken.clear()

    def _finish_reading(self) -> None:
        self.ledger.finish_reading()
        self.ledger.remember(self._earlier.values())
        self._earlier.clear()
        self.ledger.evaluated.clear()  # an earlier reader has reported these rewards
        log.info("sessions_read", live=len(self.ledger.live), bytes=self.position)
        super()._finish_reading()

    def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        reason = f"does not decode: {error}" if isinstance(error, DecodeError) else dead_letter_reason(error)
        self._refuse(delivery, reason)

    def _refuse(self, delivery: Delivery, reason: str) -> None:
        self.not_taken[delivery.offset or 0] = RefusedMessage(delivery, reason)

    def _apply(self, message: Message, delivery: Delivery) -> EventEffect | None:
        if delivery.routing_key == EVENT:
            return self._change(message, delivery, self._counted_time(delivery))
        if delivery.routing_key == OUTSIDE:
            _check_outside(message)
        effect = self._change(message, delivery, self._present_time())
        if effect.taken == "refused":
            self._refuse(delivery, effect.reason)
        return None

    def _counted_time(self, delivery: Delivery) -> float:
        """Return the time of a gateway's event minus the seconds paused until then, and update :attr:`time` and
        :attr:`paused` from the event.
        """
        at, paused = _time_of(delivery), delivery.headers.get(PAUSED_MS)
        if at is None:
            return self._present_time()
        self.time = max(self.time, at)
        if not isinstance(paused, int):  # an event of release 0.1.0
            return at - self.paused
        self.paused = max(self.paused, paused / 1000)
        return at - paused / 1000

    def _present_time(self) -> float:
        """Return the time for an event without a time, minus the paused seconds: now, or the time of the latest event
        until the stream has been read.
        """
        if self._ready:
            self.time = max(self.time, self._clock())
        return self.time - self.paused

    def _change(self, message: Message, delivery: Delivery, at: float) -> EventEffect:
        ledger = self.ledger
        match message:
            case SessionsTrained():
                ledger.apply_trained(message)
            case SubmissionOutcome():
                ledger.apply_outcome(message)
            case SessionsCommitted():
                ledger.apply_committed()
            case SessionRefused():
                self.apply_refused(message)
            case SessionOpened() | SessionCall() | SessionReward() | SessionEnd() | SessionsDecided():
                is_own, offset = delivery.routing_key == EVENT, delivery.offset or 0
                origin = delivery.headers.get(ORIGIN) if is_own else None
                event = Event(
                    origin if isinstance(origin, int) else offset,
                    self.position - len(delivery.body),
                    delivery.message_id or f"offset-{offset}",
                    at,
                    message,
                    len(delivery.body),
                    not is_own or delivery.headers.get(BY) == OUTSIDE,
                )
                return ledger.apply(event)
        return EventEffect("new")


def _check_outside(message: Message) -> None:
    """Check an event that another program published.

    Raises:
        DecodeError: The event is not allowed.
    """
    if isinstance(message, SessionEnd) and message.replay is not None:
        raise DecodeError("a replay by message, which no key allows: use POST /s/<id>/end of a gateway")
    if isinstance(message, SessionReward | SessionEnd) and (problem := report_problem(message)) is not None:
        raise DecodeError(problem)


def _not_recorded(call: SessionCall, reason: str) -> bool:
    log.warning("call_not_recorded", session=call.session, call=call.call, reason=reason)
    return False


def _time_of(delivery: Delivery) -> float | None:
    """Return the time in an event's headers in seconds since the epoch, None without a valid time."""
    exact, seconds = delivery.headers.get(AT_MS), delivery.headers.get(AT)
    if isinstance(exact, int):
        return exact / 1000
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None
