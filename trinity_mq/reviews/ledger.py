"""Derives the reviews of a run of the system from the events on their stream: a pure function of the events in order.

Operators, the command line and the dashboard read the same stream and derive the same reviews. The first request with
an id opens the review, and its deadline counts. The first verdict on a review is recorded. The first ``review_closed``
decides the outcome. Later events are refused with a reason and change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from trinity_mq.messages import ReviewClosed, ReviewRequest, ReviewVerdict
from trinity_mq.transport.event_log import EventEffect

MAX_REWARD = 1e9
"""Maximum absolute reward of a verdict. Sums and squares of the rewards of a group stay finite."""
KEPT_CLOSED = 2000
"""Maximum number of closed reviews in memory. This is far more than a batch has, so a redelivered batch finds its
reviews.
"""
KEPT_EARLY = 1000
"""Maximum number of kept verdicts on unknown requests. Retention may have removed such a request; the verdict counts
when an operator repeats the request.
"""
KEPT_IDS = 100_000
"""Maximum number of remembered message ids of verdicts. A repeated id does not count again."""

T = TypeVar("T")

ReviewEvent = ReviewRequest | ReviewVerdict | ReviewClosed


@dataclass(slots=True)
class Review:
    """A request for a review, the first verdict on it and the event that closed it."""

    request: ReviewRequest
    verdict: ReviewVerdict | None = None
    """First verdict on the request."""
    closed: ReviewClosed | None = None

    @property
    def is_pending(self) -> bool:
        """True if the review has no verdict yet and is not closed."""
        return self.verdict is None and self.closed is None


class ReviewLedger:
    """Reviews by request id."""

    def __init__(self) -> None:
        self._open: dict[str, Review] = {}
        self._closed: OrderedDict[str, Review] = OrderedDict()
        self._orphans: OrderedDict[str, ReviewClosed] = OrderedDict()
        """Closed events whose request has not been read, by request id."""
        self._early: OrderedDict[str, ReviewVerdict] = OrderedDict()
        self._ids: OrderedDict[str, None] = OrderedDict()

    def get(self, request: str) -> Review | None:
        """Return a review. Return None if its request is unknown, or closed and forgotten."""
        return self._open.get(request) or self._closed.get(request)

    def closing(self, request: str) -> ReviewClosed | None:
        """Return the closed event of a request, even if the request itself has not been read. Return None if no closed
        event is known for the request.
        """
        review = self.get(request)
        return self._orphans.get(request) if review is None else review.closed

    def __iter__(self) -> Iterator[Review]:
        """Yield the open reviews in the order of their requests, then the closed reviews in the order of their
        closing.
        """
        yield from self._open.values()
        yield from self._closed.values()

    def pending(self) -> list[Review]:
        """Return the reviews that wait for a verdict, in the order of their requests."""
        return [review for review in self._open.values() if review.is_pending]

    def apply(self, event: ReviewEvent, message_id: str) -> EventEffect:
        """Apply the next event of the stream; return its effect.

        Args:
            event: The event.
            message_id: Message id of the event. A message that is published again under the same id counts once.
        """
        match event:
            case ReviewRequest():
                return self._request(event)
            case ReviewVerdict():
                return self._verdict(event, message_id)
            case ReviewClosed():
                return self._close(event)

    def _request(self, request: ReviewRequest) -> EventEffect:
        if self.get(request.request) is not None:
            return EventEffect("repeated")
        review = Review(request, verdict=self._early.pop(request.request, None))
        if (closed := self._orphans.pop(request.request, None)) is not None:
            self._keep_closed(review, closed)
        else:
            self._open[request.request] = review
        return EventEffect("new")

    def _verdict(self, verdict: ReviewVerdict, message_id: str) -> EventEffect:
        if message_id in self._ids:
            return EventEffect("repeated")
        self._ids[message_id] = None
        _bound(self._ids, KEPT_IDS)
        if verdict.reward is not None and abs(verdict.reward) > MAX_REWARD:
            allowed_range = f"wanted a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
            return EventEffect("refused", f"its reward is {verdict.reward:g}, {allowed_range}")
        if (closed := self.closing(verdict.request)) is not None:
            return EventEffect("refused", f"it is closed: {verdict_text(closed)}")
        review = self.get(verdict.request)
        earlier = self._early.get(verdict.request) if review is None else review.verdict
        if earlier is not None:
            return EventEffect("refused", f"there is a verdict already: {verdict_text(earlier)}")
        if review is not None:
            review.verdict = verdict
            return EventEffect("new")
        self._early[verdict.request] = verdict
        _bound(self._early, KEPT_EARLY)
        return EventEffect(
            "unknown", f"no request {verdict.request} is known; the verdict counts if the request is made again"
        )

    def _close(self, closed: ReviewClosed) -> EventEffect:
        if (earlier := self.closing(closed.request)) is not None:
            return EventEffect("repeated" if earlier == closed else "refused", f"it is closed: {verdict_text(earlier)}")
        review = self._open.pop(closed.request, None)
        if review is None:
            self._orphans[closed.request] = closed
            _bound(self._orphans, KEPT_CLOSED)
            return EventEffect("unknown", f"no request {closed.request} is known")
        self._keep_closed(review, closed)
        return EventEffect("new")

    def _keep_closed(self, review: Review, closed: ReviewClosed) -> None:
        review.closed = closed
        self._closed[closed.request] = review
        _bound(self._closed, KEPT_CLOSED)


def verdict_text(decided: ReviewVerdict | ReviewClosed) -> str:
    """Return a short text for a verdict or an outcome."""
    what = decided.verdict if decided.reward is None else f"{decided.verdict} {decided.reward:g}"
    if isinstance(decided, ReviewClosed) and decided.how == "timeout":
        return f"{what}, the default, because nobody answered in time"
    return f"{what} by {decided.by}" if decided.by else what


def _bound(entries: OrderedDict[str, T], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
