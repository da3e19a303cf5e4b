"""Client for the review stream ``tmq.<run>.review`` of a run: reads its events into the ledger and sends verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Delivery, Queue, StreamCut, Topology
from trinity_mq.bus.base import CLOSED as CLOSED_BUS
from trinity_mq.messages import (
    DecodeError,
    Mark,
    Message,
    ReviewClosed,
    ReviewRequest,
    ReviewVerdict,
    Verdict,
    decode,
    decode_any,
)
from trinity_mq.reviews.ledger import Review, ReviewEffect, ReviewEvent, ReviewLedger
from trinity_mq.runtime.deliveries import check_readable, envelope, message_in_hand, new_mark
from trinity_mq.runtime.errors import first_leaf, is_content_error
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

REQUEST, VERDICT, CLOSED, MARK = "request", "verdict", "closed", "mark"
"""Routing keys: requests of operators, verdicts of any reviewer, outcomes, and marks of readers."""
KINDS: Mapping[str, type[Message]] = {
    REQUEST: ReviewRequest,
    VERDICT: ReviewVerdict,
    CLOSED: ReviewClosed,
    MARK: Mark,
}
"""Message class by routing key. A user who may only send verdicts can neither request nor decide reviews."""
READ_WITHIN = 15.0
"""Seconds within which a reader must find the current end of the stream."""
EFFECT_WITHIN = 15.0
"""Seconds to wait for the effect of a verdict."""


class NoReviews(Exception):
    """The run has no review stream, because none of its operators requests reviews."""


class ReviewStream:
    """Follows the reviews of a run.

    Use it as ``async with ReviewStream(bus, topology).following() as reviews:``. Then :attr:`ledger` is up to date
    after each :attr:`changed`, and :meth:`send` sends verdicts.

    Args:
        bus: A connected bus.
        topology: Names of the run.
        declare: Create the stream if it does not exist. Otherwise :class:`NoReviews` is raised.
    """

    def __init__(self, bus: Bus, topology: Topology, *, declare: bool = False) -> None:
        self.ledger = ReviewLedger()
        self.changed = Notifier()
        """Notified after each event that was read."""
        self.read_to_end = asyncio.Event()
        """Set once all events that were on the stream at the start have been read."""
        self.unreadable = 0
        """Number of messages that do not belong on the stream."""
        self._bus, self._topology, self._declares = bus, topology, declare
        self._mark = new_mark()
        self._offset = 0
        self._waiting: dict[str, asyncio.Future[ReviewEffect]] = {}
        """Futures for the effects of sent verdicts, by message id."""
        self._watched: dict[str, Notifier] = {}

    def pending(self) -> list[Review]:
        """Return the reviews that wait for a verdict, in the order of their requests."""
        return self.ledger.pending()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[ReviewStream]:
        """Follow the stream while the context lasts. On entry, all events that were on it at the start have been read.

        Raises:
            NoReviews: The stream does not exist.
            QueueGone: The stream was deleted in the meantime.
            BusUnavailable: The stream did not answer in time.
        """
        if not self._declares and await self._bus.depth(self._topology.review.name) is None:
            raise NoReviews(
                f"run {self._topology.run!r} has no stream of reviews: none of its operators requests reviews"
            )
        try:
            async with asyncio.TaskGroup() as group:
                following = group.create_task(self.follow(), name="follow reviews")
                await self._until_read()
                yield self
                following.cancel()
        except ExceptionGroup as errors:
            raise first_leaf(errors) from None

    async def _until_read(self) -> None:
        try:
            async with asyncio.timeout(READ_WITHIN):
                await self.read_to_end.wait()
        except TimeoutError:
            trouble = self._bus.trouble or "see its state with `rabbitmqctl list_queues name state`"
            raise BusUnavailable(
                f"{self._topology.review.name} did not deliver within {READ_WITHIN:g} s a message that was published "
                f"to it: {trouble}"
            ) from None

    async def follow(self) -> None:
        """Read the stream from its beginning until cancelled.

        Raises:
            QueueGone: The stream was deleted or does not exist.
        """
        stream = self._stream()
        if self._declares:
            await self._bus.declare(stream)
        marking = asyncio.create_task(self._publish_mark(), name="mark reviews")
        try:
            while True:
                try:
                    async with await self._bus.consume(stream, offset=self._offset) as feed:
                        async for delivery in feed:
                            self._read(delivery)
                        return
                except StreamCut as cut:
                    log.info("reviews_cut", asked=cut.asked, got=cut.got)
                    self._offset = cut.got
        finally:
            marking.cancel()

    def _stream(self) -> Queue:
        review = self._topology.review
        # a reader must not create the stream
        return review if self._declares else dataclasses.replace(review, redeclare=False)

    async def _publish_mark(self) -> None:
        while True:
            with contextlib.suppress(BusUnavailable):  # tasks that wait for the mark have their own time limit
                await self._bus.wait_usable()
                await self._bus.publish(self._topology.exchange("review"), MARK, self._mark)
                return
            if self._bus.trouble == CLOSED_BUS:
                return

    async def until_changed(self, request: str, seconds: float) -> bool:
        """Return True after the next event of a request, or False after ``seconds``."""
        return await self._watched.setdefault(request, Notifier()).wait(seconds)

    def forget(self, request: str) -> None:
        """Stop watching a request."""
        self._watched.pop(request, None)

    # -- output

    async def publish(self, event: ReviewEvent, key: str, message_id: str, *, timeout: float | None = None) -> None:
        """Publish an event and wait for its confirm.

        Raises:
            BusUnavailable: The event was not confirmed within ``timeout`` seconds (default: the publish timeout of the
                bus).
            NoReviews: The stream no longer exists.
        """
        message = envelope(event, message_id=message_id)
        while not await self._bus.publish(self._topology.exchange("review"), key, message, timeout=timeout):
            if not self._declares:
                raise NoReviews(f"{self._topology.review.name} does not exist any more")
            await self._bus.declare(self._topology.review)  # the stream was deleted in the meantime

    async def send(
        self, request: str, verdict: Verdict, reward: float | None = None, *, by: str = "", note: str = ""
    ) -> ReviewEffect:
        """Send a verdict and return its effect once the verdict was read back. Call it only inside :meth:`following`.

        Args:
            request: Id of the request.
            verdict: ``keep``, ``drop`` or ``reward``.
            reward: New reward. Required by the verdict ``reward`` and not allowed otherwise.
            by: Name of the reviewer.
            note: Note for human readers.

        Raises:
            ValueError: The verdict lacks a reward, or has a reward that it does not take, or the id is invalid.
            BusUnavailable: The broker did not store the verdict in time.
            NoReviews: The stream no longer exists.
        """
        event = ReviewVerdict(request=request, verdict=verdict, reward=reward, by=by, note=note)
        message_id = f"verdict-{uuid.uuid4().hex}"
        effect: asyncio.Future[ReviewEffect] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = effect
        try:
            async with asyncio.timeout(EFFECT_WITHIN):
                await self.publish(event, VERDICT, message_id)
                return await effect
        except TimeoutError:
            trouble = self._bus.trouble or "no answer"
            raise BusUnavailable(f"the verdict was not stored within {EFFECT_WITHIN:g} s: {trouble}") from None
        finally:
            del self._waiting[message_id]

    # -- input

    def _read(self, delivery: Delivery) -> None:
        offset = delivery.offset or 0
        self._offset = offset + 1
        if delivery.message_id == self._mark.message_id:
            self.read_to_end.set()
        elif not self._bus.is_foreign(delivery):
            self._take(delivery, offset)
        self.changed.notify()

    def _take(self, delivery: Delivery, offset: int) -> None:
        try:
            with message_in_hand(self._bus, delivery):
                self._take_in(delivery, offset)
        except Exception as error:
            if not is_content_error(error):
                raise
            self.unreadable += 1
            log.warning("review_unreadable", offset=offset, message_id=delivery.message_id, reason=str(error))

    def _take_in(self, delivery: Delivery, offset: int) -> None:
        message = _decoded(delivery)
        if not isinstance(message, ReviewEvent):
            return
        message_id = delivery.message_id or f"offset-{offset}"
        applied = self.ledger.apply(message, message_id)
        if isinstance(message, ReviewVerdict) and applied.taken in {"refused", "unknown"} and self._declares:
            log.warning("verdict_not_counted", request=message.request, by=message.by, reason=applied.reason)
        waiting = self._waiting.get(message_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(applied)
        if (watched := self._watched.get(message.request)) is not None:
            watched.notify()


def _decoded(delivery: Delivery) -> Message:
    """Return the event in a delivery. The routing key determines its kind, which the body may omit.

    Raises:
        DecodeError: The message is not a valid event, or its routing key does not allow the event.
    """
    check_readable(delivery)
    kind = KINDS.get(delivery.routing_key)
    if kind is None:
        received_kind = decode_any(delivery.body, delivery.content_type).kind
        raise DecodeError(
            f"a {received_kind} with the routing key {delivery.routing_key!r}, wanted one of {', '.join(KINDS)}"
        )
    return decode(delivery.body, kind, delivery.content_type)
