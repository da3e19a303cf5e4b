"""Asks people the operators' questions about a batch, over the stream of reviews."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

import structlog

from trinity_mq.bus import Bus, BusError, Topology
from trinity_mq.messages import BatchClosed, BatchId, ReviewClosed, ReviewRequest, ReviewVerdict
from trinity_mq.reviews.base import Answer, Decision, Question
from trinity_mq.reviews.stream import CLOSED, REQUEST, ReviewStream

log = structlog.get_logger(__name__)

CLOSE_WITHIN = 10.0
"""Maximum seconds after a verdict or the deadline to publish the final answer; after that it counts unpublished."""


class BatchReviews:
    """The reviews of the batch in progress; see :class:`trinity_mq.reviews.base.Reviews`.

    Args:
        bus: A connected bus.
        topology: The run's names.
        clock: Returns seconds since the epoch, because another operator that takes over the batch keeps the deadlines.
    """

    def __init__(self, bus: Bus, topology: Topology, clock: Callable[[], float] = time.time) -> None:
        self.stream = ReviewStream(bus, topology, declare=True)
        self._clock = clock
        self._batch: BatchId = 0
        self._ticket = ""
        self._asked = 0
        """Number of :meth:`ask` calls for the batch, which keeps the requests of the chain's operators apart."""
        self._unanswered: dict[str, float] = {}
        """Deadline in seconds since the epoch of each unanswered question, by request id."""

    def begin(self, manifest: BatchClosed) -> None:
        """Start the reviews of another batch."""
        self._batch, self._ticket, self._asked = manifest.batch, manifest.ticket, 0

    def unanswered(self) -> tuple[int, float]:
        """Return the number of unanswered questions, and the seconds until all their defaults count."""
        remaining_s = max(self._unanswered.values(), default=self._clock()) - self._clock()
        return len(self._unanswered), max(0.0, remaining_s)

    async def ask(self, questions: Sequence[Question], *, seconds: float, default: Decision) -> list[Answer]:
        now, self._asked = self._clock(), self._asked + 1
        requests = [self._request(question, now, now + seconds, default) for question in questions]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(request)) for request in requests]
        return [task.result() for task in tasks]

    def _request(self, question: Question, now: float, deadline: float, default: Decision) -> ReviewRequest:
        return ReviewRequest(
            request=request_id(self._ticket, self._asked, question.uid),
            batch=self._batch,
            ticket=self._ticket,
            uid=question.uid,
            calls=list(question.calls),
            reward=question.reward,
            parts=question.parts,
            reasons=list(question.reasons),
            expected=question.expected,
            asked=now,
            deadline=deadline,
            default=default.verdict,
            default_reward=default.reward,
        )

    async def _answer(self, request: ReviewRequest) -> Answer:
        self._unanswered[request.request] = request.deadline
        try:
            await self._ask_once(request)
            verdict = await self._verdict(request)
            closed = await self._close(_closing(request, verdict))
        finally:
            del self._unanswered[request.request]
            self.stream.forget(request.request)
        return Answer(Decision(closed.verdict, closed.reward), closed.how == "timeout", closed.by, closed.note)

    async def _ask_once(self, request: ReviewRequest) -> None:
        """Publish a request before its deadline, unless it is already on the stream."""
        seconds = request.deadline - self._clock()
        try:
            async with asyncio.timeout(seconds):
                await self.stream.changed.until(self.stream.is_ready)
                if self._is_known(request):
                    return
                await self.stream.publish(request, REQUEST, f"review-{request.request}", timeout=seconds)
                while not self._is_known(request):
                    await self.stream.until_changed(request.request, seconds)
        except (TimeoutError, BusError) as error:
            log.warning("review_not_asked", request=request.request, reason=str(error) or "no broker within its time")

    def _is_known(self, request: ReviewRequest) -> bool:
        ledger = self.stream.ledger
        return ledger.get(request.request) is not None or ledger.closing(request.request) is not None

    async def _verdict(self, request: ReviewRequest) -> ReviewVerdict | ReviewClosed | None:
        """Return the first verdict, or the final answer on the stream; None after the first request's deadline."""
        ledger = self.stream.ledger
        while True:
            if (closed := ledger.closing(request.request)) is not None:
                return closed
            review = ledger.get(request.request)
            if review is not None and review.verdict is not None:
                return review.verdict
            deadline = request.deadline if review is None else min(request.deadline, review.request.deadline)
            if (remaining_s := deadline - self._clock()) <= 0:
                return None
            await self.stream.until_changed(request.request, remaining_s)

    async def _close(self, closing: ReviewClosed) -> ReviewClosed:
        """Publish the final answer and return the first final answer on the stream, which another operator may have
        published.
        """
        ledger, request = self.stream.ledger, closing.request
        if (closed := ledger.closing(request)) is not None:
            return closed
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await self.stream.publish(closing, CLOSED, f"review-closed-{request}", timeout=CLOSE_WITHIN)
                while (closed := ledger.closing(request)) is None:
                    await self.stream.until_changed(request, CLOSE_WITHIN)
                return closed
        except (TimeoutError, BusError) as error:
            log.warning("review_not_closed", request=request, reason=str(error) or f"not within {CLOSE_WITHIN:g} s")
            return closing


def request_id(ticket: str, place: int, uid: str) -> str:
    """Return the id of the request about experience ``uid`` by the ``place``-th asking operator of a ticket."""
    return hashlib.sha256(f"{ticket}\n{place}\n{uid}".encode()).hexdigest()[:16]


def _closing(request: ReviewRequest, verdict: ReviewVerdict | ReviewClosed | None) -> ReviewClosed:
    if isinstance(verdict, ReviewClosed):
        return verdict
    common = {"request": request.request, "batch": request.batch, "ticket": request.ticket}
    if verdict is None:
        return ReviewClosed(**common, verdict=request.default, reward=request.default_reward, how="timeout")
    return ReviewClosed(
        **common, verdict=verdict.verdict, reward=verdict.reward, how="verdict", by=verdict.by, note=verdict.note
    )
