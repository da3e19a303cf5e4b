"""Sessions on the stream ``tmq.<run>.sessions``: publishes events, and reads all of them into the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, Delivery, Envelope, MessageTooLarge, StreamCut, Topology
from trinity_mq.bus.base import HeaderValue
from trinity_mq.gateway.book import BookUnavailable, EventTooLarge, Said
from trinity_mq.gateway.ledger import Applied, Ledger
from trinity_mq.gateway.rules.reported import report_problem
from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import (
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
from trinity_mq.runtime.deliveries import envelope, new_mark
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

EVENT, OUTSIDE, OUTCOME = "event", "session", "outcome"
"""Routing keys: of what gateways publish, of rewards and ends by other programs, of what batches made of tasks."""
ORIGIN, AT = "origin", "at"
"""Headers of events of gateways: the offset of an event's first copy, and its time in seconds since the epoch."""
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
"""Kinds of messages by routing key: who may only reward sessions can neither make one nor decide about it."""
KNOWN_WITHIN = 2.0
"""Seconds to wait for a session that was begun through another gateway a moment ago."""
SAID_WITHIN = 30.0
"""Seconds to wait for the effect of a reward or an end."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message on the stream that is no event."""

    offset: int
    delivery: Delivery
    reason: str


class StreamBook:
    """The book of one gateway; see :class:`trinity_mq.gateway.book.Book`.

    Args:
        bus: A connected bus that knows its run.
        topology: The run's names.
        record_timeout: Seconds for the confirm of an answer.
        tasks: Publishes that nobody waits for any more run here.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        *,
        record_timeout: float,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = Ledger()
        self.changed = Notifier()
        """Notified after each event that was read."""
        self.position = 0
        """Bytes of all events read so far."""
        self.unreadable: list[Unreadable] = []
        self._bus, self._topology, self._clock, self._tasks = bus, topology, clock, tasks
        self._record_timeout = record_timeout
        self._ready = False
        self._time = 0.0
        """Time of the latest event."""
        self._waiting: dict[str, list[asyncio.Future[Applied]]] = {}
        """Callers that wait for the effect of an event, by message id."""
        self._offset = 0

    def is_ready(self) -> bool:
        return self._ready

    # -- out

    async def open(self, opened: SessionOpened) -> None:
        await self._kept(opened, f"opened-{opened.session}")

    async def find(self, session: str) -> Session | None:
        return await self._known(lambda: self.ledger.get(session))

    async def find_key(self, key_hash: str) -> Session | None:
        return await self._known(lambda: self.ledger.of_key(key_hash))

    async def _known(self, look: Callable[[], Session | None]) -> Session | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN):
                await self.changed.until(lambda: look() is not None)
        return look()

    async def record(self, call: SessionCall) -> bool:
        publishing = self._tasks.create_task(self._publish_call(call), name="record call")
        # of a broker that is away it is known already that it does not confirm in time
        done, _ = await asyncio.wait([publishing], timeout=self._record_timeout if self._bus.usable else 0.0)
        return bool(done) and publishing.result()

    async def say(self, event: Said | SessionsDecided, message_id: str) -> Applied:
        return await self._kept(event, message_id)

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
            BusUnavailable: It was not confirmed in time.
            MessageTooLarge: It is too large.
        """
        stamped: dict[str, HeaderValue] = {AT: self._clock() if at is None else at, **(headers or {})}
        await self._publish(envelope(message, message_id=message_id, headers=stamped))

    async def _publish(self, message: Envelope) -> None:
        while not await self._bus.publish(self._topology.exchange("sessions"), EVENT, message):
            await self._bus.declare(self._topology.sessions)  # it was deleted under us

    async def _publish_call(self, call: SessionCall) -> bool:
        try:
            await self.publish(call, call.message_id)
        except (BusError, ValueError) as error:
            log.warning("call_not_recorded", session=call.session, call=call.call, reason=str(error))
            return False
        return True

    async def _kept(self, message: Message, message_id: str) -> Applied:
        """Publish an event and return its effect, once it was read back."""
        if not self._bus.usable:
            await self._patiently()
        effect: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(message_id, []).append(effect)
        try:
            async with asyncio.timeout(SAID_WITHIN):
                await self.publish(message, message_id)
                return await effect
        except TimeoutError:
            trouble = self._bus.trouble or "no answer"
            raise BookUnavailable(f"the broker has not kept it within {SAID_WITHIN:g} s: {trouble}") from None
        except MessageTooLarge as error:
            raise EventTooLarge(str(error)) from error
        except BusUnavailable as error:
            raise BookUnavailable(str(error)) from error
        finally:
            left = self._waiting.get(message_id, [])
            if effect in left:
                left.remove(effect)
            if not left:
                self._waiting.pop(message_id, None)

    async def _patiently(self) -> None:
        """Wait a moment for a broker that is away.

        Raises:
            BookUnavailable: It stays away.
        """
        try:
            async with asyncio.timeout(self._record_timeout):
                await self._bus.wait_usable()
        except (TimeoutError, BusUnavailable):
            trouble = self._bus.trouble or "it was away for a moment"
            raise BookUnavailable(f"the broker keeps nothing now: {trouble}; say it again later") from None

    # -- in

    async def follow(self) -> None:
        """Read the stream from its beginning, for ever; the book is ready once all that was there has been read."""
        mark = new_mark()
        await self._bus.declare(self._topology.sessions)
        await self._publish(mark)
        while True:
            try:
                async with await self._bus.consume(self._topology.sessions, offset=self._offset) as feed:
                    async for delivery in feed:
                        self._read(delivery, mark.message_id)
                    return
            except StreamCut as cut:
                log.info("sessions_cut", asked=cut.asked, got=cut.got)
                self._offset = cut.got

    def _read(self, delivery: Delivery, mark: str) -> None:
        offset = delivery.offset or 0
        self._offset = offset + 1
        self.position += len(delivery.body)
        if not self._bus.is_foreign(delivery):
            self._take(delivery, offset)
        if delivery.message_id == mark and not self._ready:
            self._ready = True
            log.info("sessions_read", live=len(self.ledger.live), bytes=self.position)
        self.changed.notify()

    def _take(self, delivery: Delivery, offset: int) -> None:
        try:
            message = _decoded(delivery)
        except DecodeError as error:
            self.unreadable.append(Unreadable(offset, delivery, str(error)))
            return
        given = delivery.headers.get(AT) if delivery.routing_key == EVENT else None
        if isinstance(given, int | float):
            self._time = max(self._time, float(given))
        elif self._ready:  # of somebody else, who gives no time
            self._time = max(self._time, self._clock())
        applied = self._apply(message, delivery, offset, float(given) if isinstance(given, int | float) else self._time)
        for waiting in self._waiting.pop(delivery.message_id or "", ()):
            if not waiting.done():
                waiting.set_result(applied)

    def _apply(self, message: Message, delivery: Delivery, offset: int, at: float) -> Applied:
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
                self.unreadable = [one for one in self.unreadable if one.offset != message.offset]
            case SessionOpened() | SessionCall() | SessionReward() | SessionEnd() | SessionsDecided():
                origin = delivery.headers.get(ORIGIN) if delivery.routing_key == EVENT else None
                event = Event(
                    origin if isinstance(origin, int) else offset,
                    self.position - len(delivery.body),
                    delivery.message_id or f"offset-{offset}",
                    at,
                    message,
                    len(delivery.body),
                )
                return ledger.apply(event)
        return Applied("new")


def _decoded(delivery: Delivery) -> Message:
    """Return the event in a delivery. The header ``kind`` may say what it is in place of the body.

    Raises:
        DecodeError: It is none, or none that its routing key allows.
    """
    message = _message(delivery)
    if delivery.routing_key != OUTSIDE or not isinstance(message, SessionReward | SessionEnd):
        return message
    if (problem := report_problem(message)) is not None:
        raise DecodeError(problem)
    return message


def _message(delivery: Delivery) -> Message:
    kinds = KINDS.get(delivery.routing_key, {})
    if (kind := kinds.get(delivery.kind or "")) is not None:
        message = decode(delivery.body, kind, delivery.content_type)
    else:
        message = decode_any(delivery.body, delivery.content_type)
    if message.kind not in kinds:
        wanted = ", ".join(sorted(kinds)) or "nothing"
        raise DecodeError(f"a {message.kind} with the routing key {delivery.routing_key!r}, which takes {wanted}")
    if delivery.routing_key == OUTSIDE and isinstance(message, SessionEnd) and message.replay is not None:
        raise DecodeError("a replay by message, which no key allows: ask a gateway's POST /s/<id>/end for it")
    return message
