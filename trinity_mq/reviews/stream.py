"""Client for the review stream ``tmq.<run>.review`` of a run: reads its events into the ledger and sends verdicts."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Delivery, QueueGone, StreamCut, Topology
from trinity_mq.messages import Mark, Message, ReviewClosed, ReviewRequest, ReviewVerdict, Verdict
from trinity_mq.reviews.ledger import Review, ReviewEvent, ReviewLedger
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import first_leaf
from trinity_mq.runtime.notify import Notifier
from trinity_mq.transport.event_log import EventEffect, EventLog, Kinds

log = structlog.get_logger(__name__)

REQUEST, VERDICT, CLOSED, MARK = "request", "verdict", "closed", "mark"
"""Routing keys: requests of operators, verdicts of any reviewer, outcomes, and marks of readers."""
KINDS: Kinds = {
    key: {kind.kind: kind}
    for key, kind in ((REQUEST, ReviewRequest), (VERDICT, ReviewVerdict), (CLOSED, ReviewClosed), (MARK, Mark))
}
"""Message class of each routing key. A user who may only send verdicts can neither request nor decide reviews."""
READ_WITHIN = 15.0
"""Seconds within which a reader must find the current end of the stream."""
EFFECT_WITHIN = 15.0
"""Seconds to wait until a sent verdict was read back from the stream."""


class NoReviews(QueueGone):
    """The run has no review stream, because none of its operators requests reviews."""


class ReviewStream(EventLog):
    """Follows the reviews of a run of the system.

    Use it as ``async with ReviewStream(bus, topology).following() as reviews:``. Inside the block, :attr:`ledger` is up
    to date after each :attr:`changed`, and :meth:`send` sends verdicts.

    Args:
        bus: A connected bus.
        topology: Names of the run.
        declare: Create the stream if it does not exist. False: :meth:`following` then raises :class:`NoReviews`.
    """

    def __init__(self, bus: Bus, topology: Topology, *, declare: bool = False) -> None:
        # a reader must not create the stream
        stream = topology.review if declare else dataclasses.replace(topology.review, redeclare=False)
        super().__init__(bus, stream, KINDS, MARK)
        self.ledger = ReviewLedger()
        self._run, self._declares = topology.run, declare
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
        if not self._declares and await self._bus.depth(self._stream.name) is None:
            raise NoReviews(f"run {self._run!r} has no stream of reviews: none of its operators requests reviews")
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
                await self.changed.until(self.is_ready)
        except TimeoutError:
            trouble = self._bus.trouble or "see its state with `rabbitmqctl list_queues name state`"
            raise BusUnavailable(
                f"{self._stream.name} did not deliver within {READ_WITHIN:g} s a message that was published "
                f"to it: {trouble}"
            ) from None

    async def until_changed(self, request: str, seconds: float) -> bool:
        """Return True after the next event of a request, or False after ``seconds``."""
        return await self._watched.setdefault(request, Notifier()).wait(seconds)

    def forget(self, request: str) -> None:
        """Stop watching a request."""
        self._watched.pop(request, None)

    # -- publishing events

    async def publish(self, event: ReviewEvent, key: str, message_id: str, *, timeout: float | None = None) -> None:
        """Publish an event and wait for its confirm.

        Raises:
            BusUnavailable: The event was not confirmed within ``timeout`` seconds (default: the publish timeout of the
                bus).
            QueueGone: The stream no longer exists, and this client does not declare it.
        """
        await self._bus.publish_declared(self._stream, key, envelope(event, message_id=message_id), timeout=timeout)

    async def send(
        self, request: str, verdict: Verdict, reward: float | None = None, *, by: str = "", note: str = ""
    ) -> EventEffect:
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
            QueueGone: The stream no longer exists.
        """
        event = ReviewVerdict(request=request, verdict=verdict, reward=reward, by=by, note=note)
        message = envelope(event, message_id=f"verdict-{uuid.uuid4().hex}")
        return await self._publish_and_read_back(VERDICT, message, EFFECT_WITHIN)

    # -- applying the events that were read

    def _begin_after(self, cut: StreamCut) -> None:
        log.info("reviews_cut", asked=cut.asked, got=cut.got)

    def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        log.warning("review_unreadable", offset=delivery.offset, message_id=delivery.message_id, reason=str(error))

    def _apply(self, message: Message, delivery: Delivery) -> EventEffect | None:
        if not isinstance(message, ReviewEvent):
            return None
        effect = self.ledger.apply(message, delivery.message_id or f"offset-{delivery.offset}")
        if isinstance(message, ReviewVerdict) and effect.taken in {"refused", "unknown"} and self._declares:
            log.warning("verdict_not_counted", request=message.request, by=message.by, reason=effect.reason)
        if (watched := self._watched.get(message.request)) is not None:
            watched.notify()
        return effect
