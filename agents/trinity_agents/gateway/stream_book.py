"""Sessions on the stream ``tmq.<run>.sessions``: publishes events, and reads all events into the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, Delivery, Envelope, MessageTooLarge, StreamCut, Topology
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.gateway.book import BookUnavailable, EventTooLarge, Said
from trinity_mq.gateway.ledger import Ledger, SessionEffect
from trinity_mq.gateway.rules.reported import report_problem
from trinity_mq.gateway.session import Event, Session
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
    decode,
    decode_any,
)
from trinity_mq.runtime.deliveries import check_readable, envelope, message_in_hand, new_mark
from trinity_mq.runtime.errors import dead_letter_reason, is_content_error
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

EVENT, OUTSIDE, OUTCOME = "event", "session", "outcome"
"""Routing keys: events of gateways, rewards and ends by other programs, outcomes of submitted tasks."""
ORIGIN, AT, AT_MS = "origin", "at", "at-ms"
"""Headers of gateway events: the stream offset of an event's first copy, and the event's time since the epoch in whole
seconds and in milliseconds. Release 0.1.0 reads only the seconds. Integers are used, because AMQP would carry a float
in 32 bits."""
BY = "by"
"""Header of an event that a gateway published again: the routing key of its first copy, if an outsider sent it."""
PAUSED_MS = "paused-ms"
"""Header of gateway events: milliseconds since the start of the run for which session time limits were paused."""
FROM_OUTSIDE = (SessionReward, SessionEnd)
KINDS: Mapping[str, Mapping[str, type[Message]]] = {
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
SAID_WITHIN = 30.0
"""Maximum seconds to wait for the effect of a published event."""
MOST_UNCONFIRMED = 64 * 1024**2
"""Maximum bytes of answers that wait for the broker's confirm; further answers are reported as not recorded."""
PUBLISH_COST = 4096
"""Bytes of memory that a waiting publish takes in addition to its body."""


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message on the stream that is not an event, or an outsider's event that its session refused."""

    offset: int
    delivery: Delivery
    reason: str


class SessionStream:
    """The book of one gateway; see :class:`trinity_mq.gateway.book.Book`.

    Args:
        bus: A connected bus that knows its run.
        topology: The run's names.
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
        self.ledger = Ledger()
        self.changed = Notifier()
        """Notified after each event that was read."""
        self.position = 0
        """Bytes of all events read so far."""
        self.not_taken: list[RefusedMessage] = []
        """Messages for the acting gateway to dead-letter."""
        self.paused = 0.0
        """Seconds for which session time limits were paused, because agents could not have kept them."""
        self.time = 0.0
        """Time of the latest event in seconds since the epoch, 0 before the first event."""
        self._bus, self._topology, self._clock, self._tasks = bus, topology, clock, tasks
        self._record_timeout = record_timeout
        self._ready = False
        self._most_unconfirmed, self._unconfirmed = most_unconfirmed, 0
        self._waiting: dict[str, list[asyncio.Future[SessionEffect]]] = {}
        """Futures of callers that wait for the effect of an event, by message id."""
        self._offset = 0
        self._earlier: dict[str, Session] = {}
        """Sessions of the previous ledgers, kept until the book is ready again."""

    def is_ready(self) -> bool:
        return self._ready

    def now(self) -> float:
        """Return the time for session time limits: seconds since the epoch minus the paused seconds."""
        return self._clock() - self.paused

    # -- publishing

    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        if at_once and not self._bus.usable:
            raise BookUnavailable(self._refusal)
        await self._publish_and_read_back(opened, f"opened-{opened.session}")

    async def find(self, session: str) -> Session | None:
        return await self._find(lambda: self.ledger.get(session))

    async def find_key(self, key_hash: str) -> Session | None:
        return await self._find(lambda: self.ledger.of_key(key_hash))

    async def _find(self, look: Callable[[], Session | None]) -> Session | None:
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

    async def say(self, event: Said | SessionsDecided, message_id: str) -> SessionEffect:
        return await self._publish_and_read_back(event, message_id)

    async def catch_up(self) -> None:
        """Wait until all present messages of the stream have been read.

        Raises:
            BookUnavailable: The messages were not read in time.
        """
        mark = Mark(nonce=uuid.uuid4().hex)
        await self._publish_and_read_back(mark, f"mark-{mark.nonce}")

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

        Raises:
            BusUnavailable: The event was not confirmed in time.
            MessageTooLarge: The event is too large.
            ContentError: The event holds a value that cannot be encoded.
        """
        stamped = {**self._stamps(at), **(headers or {})}
        await self._publish(envelope(message, message_id=message_id, headers=stamped))

    async def republish(self, event: Event) -> None:
        """Publish a copy of an event that retention is about to remove; raises the errors of :meth:`publish`.

        The time includes the pauses, so that release 0.1.0, which does not know pauses, sees the same session age.
        """
        headers: dict[str, HeaderValue] = {ORIGIN: event.origin}
        if event.outside:
            headers[BY] = OUTSIDE
        try:
            await self.publish(event.body, event.message_id, headers, at=event.at + self.paused)
        except ContentError as error:  # our copy may exceed the body limits, because it has all optional fields
            log.warning("event_not_republished", message_id=event.message_id, reason=str(error))

    def _stamps(self, at: float | None = None) -> dict[str, HeaderValue]:
        at = self._clock() if at is None else at
        return {AT: round(at), AT_MS: round(at * 1000), PAUSED_MS: round(self.paused * 1000)}

    async def _publish(self, message: Envelope) -> None:
        while not await self._bus.publish(self._topology.exchange("sessions"), EVENT, message):
            await self._bus.declare(self._topology.sessions)  # the stream was deleted while in use

    async def _publish_call(self, session: str, call: str, message: Envelope) -> bool:
        try:
            await self._publish(message)
        except (BusError, ValueError) as error:
            log.warning("call_not_recorded", session=session, call=call, reason=str(error))
            return False
        return True

    async def _publish_and_read_back(self, message: Message, message_id: str) -> SessionEffect:
        """Publish an event and return its effect after it was read back from the stream."""
        if not self._bus.usable:
            await self._wait_for_broker()
        effect: asyncio.Future[SessionEffect] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(message_id, []).append(effect)
        try:
            async with asyncio.timeout(SAID_WITHIN):
                await self.publish(message, message_id)
                return await effect
        except TimeoutError:
            trouble = self._bus.trouble or "no answer"
            raise BookUnavailable(f"the broker has not confirmed it within {SAID_WITHIN:g} s: {trouble}") from None
        except MessageTooLarge as error:
            raise EventTooLarge(str(error)) from error
        except BusUnavailable as error:
            raise BookUnavailable(str(error)) from error
        finally:
            futures = self._waiting.get(message_id, [])
            if effect in futures:
                futures.remove(effect)
            if not futures:
                self._waiting.pop(message_id, None)

    async def _wait_for_broker(self) -> None:
        """Wait up to ``record_timeout`` seconds for an unavailable broker.

        Raises:
            BookUnavailable: The broker stays unavailable.
        """
        try:
            async with asyncio.timeout(self._record_timeout):
                await self._bus.wait_usable()
        except (TimeoutError, BusUnavailable):
            raise BookUnavailable(self._refusal) from None

    @property
    def _refusal(self) -> str:
        return f"the broker is not available: {self._bus.trouble or 'it was away for a moment'}; retry later"

    # -- reading

    async def follow(self) -> None:
        """Read the stream from its beginning, until cancelled; the book is ready once all initial messages were read.

        If retention has removed the next messages, the fate of the sessions is unknown, and the book is rebuilt.
        """
        while True:
            mark = new_mark()
            await self._bus.declare(self._topology.sessions)
            await self._publish(mark)
            try:
                async with await self._bus.consume(self._topology.sessions, offset=self._offset) as feed:
                    async for delivery in feed:
                        self._read(delivery, mark.message_id)
                    return
            except StreamCut as cut:
                log.info("sessions_truncated", asked=cut.asked, got=cut.got)
                self._rebuild(cut.got)

    def _rebuild(self, offset: int) -> None:
        """Forget all sessions, in order to read them again from ``offset``.

        Waiting callers are answered when their event is read; if it was removed, their wait times out and they retry.
        """
        self._earlier |= {session.id: session for session in self.ledger}
        self.ledger, self._ready, self._offset = Ledger(), False, offset
        self.not_taken.clear()
        self.changed.notify()

    def _read(self, delivery: Delivery, mark: str) -> None:
        offset = delivery.offset or 0
        self._offset = offset + 1
        self.position += len(delivery.body)
        if not self._bus.is_foreign(delivery):
            self._take(delivery, offset)
        if delivery.message_id == mark and not self._ready:
            self._ready = True
            self.ledger.finish_reading()
            self.ledger.remember(self._earlier.values())
            self._earlier.clear()
            self.ledger.evaluated.clear()  # already reported
            log.info("sessions_read", live=len(self.ledger.live), bytes=self.position)
        self.changed.notify()

    def _take(self, delivery: Delivery, offset: int) -> None:
        try:
            with message_in_hand(self._bus, delivery):
                self._take_in(delivery, offset)
        except Exception as error:
            if not is_content_error(error):
                raise
            reason = f"does not decode: {error}" if isinstance(error, DecodeError) else dead_letter_reason(error)
            self.not_taken.append(RefusedMessage(offset, delivery, reason))

    def _take_in(self, delivery: Delivery, offset: int) -> None:
        message = _decoded(delivery)
        is_own = delivery.routing_key == EVENT
        applied = self._apply(
            message, delivery, offset, self._counted_time(delivery) if is_own else self._present_time()
        )
        if not is_own:
            if applied.taken == "refused":
                self.not_taken.append(RefusedMessage(offset, delivery, applied.reason))
            return
        for waiting in self._waiting.pop(delivery.message_id or "", ()):
            if not waiting.done():
                waiting.set_result(applied)

    def _counted_time(self, delivery: Delivery) -> float:
        """Return the time of a gateway's event minus the paused seconds, and update the book's time and pauses."""
        at, paused = _time_of(delivery), delivery.headers.get(PAUSED_MS)
        if at is None:
            return self._present_time()
        self.time = max(self.time, at)
        if not isinstance(paused, int):  # an event of release 0.1.0
            return at - self.paused
        self.paused = max(self.paused, paused / 1000)
        return at - paused / 1000

    def _present_time(self) -> float:
        """Return the time for an event without a time: now, or the latest event's time while the book is read."""
        if self._ready:
            self.time = max(self.time, self._clock())
        return self.time - self.paused

    def _apply(self, message: Message, delivery: Delivery, offset: int, at: float) -> SessionEffect:
        ledger = self.ledger
        match message:
            case SessionsTrained():
                ledger.apply_trained(message)
            case SubmissionOutcome():
                ledger.apply_outcome(message)
            case SessionsCommitted():
                ledger.apply_committed()
            case SessionRefused():
                ledger.apply_refused(message)
                self.not_taken = [refused for refused in self.not_taken if refused.offset != message.offset]
            case SessionOpened() | SessionCall() | SessionReward() | SessionEnd() | SessionsDecided():
                is_own = delivery.routing_key == EVENT
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
        return SessionEffect("new")


def _decoded(delivery: Delivery) -> Message:
    """Return the event in a delivery. The header ``kind`` may name its kind instead of the body.

    Raises:
        DecodeError: The message is not an event, or the routing key does not allow its kind.
    """
    message = _message(delivery)
    if delivery.routing_key != OUTSIDE or not isinstance(message, SessionReward | SessionEnd):
        return message
    if (problem := report_problem(message)) is not None:
        raise DecodeError(problem)
    return message


def _message(delivery: Delivery) -> Message:
    check_readable(delivery)
    kinds = KINDS.get(delivery.routing_key, {})
    if (kind := kinds.get(delivery.kind or "")) is not None:
        message = decode(delivery.body, kind, delivery.content_type)
    else:
        message = decode_any(delivery.body, delivery.content_type)
    if message.kind not in kinds:
        expected = ", ".join(sorted(kinds)) or "nothing"
        raise DecodeError(f"a {message.kind} with the routing key {delivery.routing_key!r}, which takes {expected}")
    if delivery.routing_key == OUTSIDE and isinstance(message, SessionEnd) and message.replay is not None:
        raise DecodeError("a replay by message, which no key allows: use POST /s/<id>/end of a gateway")
    return message


def _not_recorded(call: SessionCall, reason: str) -> bool:
    log.warning("call_not_recorded", session=call.session, call=call.call, reason=reason)
    return False


def _time_of(delivery: Delivery) -> float | None:
    """Return the time in an event's headers in seconds since the epoch, None without a valid time."""
    exact, seconds = delivery.headers.get(AT_MS), delivery.headers.get(AT)
    if isinstance(exact, int):
        return exact / 1000
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None
