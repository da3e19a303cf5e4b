"""Works out the reviews of a run from the events on their stream: a pure function of the order of the events.

Operators, the command line and the dashboard read the same stream and come to the same reviews. The first request of an
id opens it, and its deadline counts; the first verdict for it is noted; the first ``review_closed`` decides what
counted. What comes later is refused with a reason and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from trinity_mq.messages import ReviewClosed, ReviewRequest, ReviewVerdict

MAX_REWARD = 1e9
"""Greatest size of a reward that a verdict gives: sums and squares of those of a group stay numbers."""
KEPT_CLOSED = 2000
"""Closed reviews that are kept: far more than one batch has, so that a batch that comes again finds its own."""
KEPT_EARLY = 1000
"""Verdicts kept for requests that are not known: retention may have cut them, and an operator asks again."""
KEPT_IDS = 100_000
"""Message ids of verdicts that are remembered, so that each counts once."""

T = TypeVar("T")

ReviewEvent = ReviewRequest | ReviewVerdict | ReviewClosed
Taken = Literal["new", "repeated", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Applied:
    """The effect of one event."""

    taken: Taken
    reason: str = ""
    """Why it was refused, or waits."""


@dataclass(slots=True)
class Review:
    """One request and what has become of it."""

    request: ReviewRequest
    verdict: ReviewVerdict | None = None
    """The first one that was given."""
    closed: ReviewClosed | None = None

    @property
    def is_pending(self) -> bool:
        """Nobody has given a verdict yet, and it is not closed."""
        return self.verdict is None and self.closed is None


class ReviewLedger:
    """Reviews by id of their request."""

    def __init__(self) -> None:
        self._open: dict[str, Review] = {}
        self._closed: OrderedDict[str, Review] = OrderedDict()
        self._orphans: OrderedDict[str, ReviewClosed] = OrderedDict()
        """Closings whose request has not been read."""
        self._early: OrderedDict[str, ReviewVerdict] = OrderedDict()
        self._ids: OrderedDict[str, None] = OrderedDict()

    def get(self, request: str) -> Review | None:
        """Return a review, None where its request is not known, or closed and forgotten."""
        return self._open.get(request) or self._closed.get(request)

    def closing(self, request: str) -> ReviewClosed | None:
        """Return what counted for a request, also where the request itself has not been read; None: still open."""
        review = self.get(request)
        return self._orphans.get(request) if review is None else review.closed

    def __iter__(self) -> Iterator[Review]:
        """Yield the open reviews in the order of their requests, then the closed ones in that of their closings."""
        yield from self._open.values()
        yield from self._closed.values()

    def pending(self) -> list[Review]:
        """Return the reviews that wait for a verdict, in the order of their requests."""
        return [review for review in self._open.values() if review.is_pending]

    def apply(self, event: ReviewEvent, message_id: str) -> Applied:
        """Take in the next event of the stream.

        Args:
            event: The message.
            message_id: Its id: a message that is published again under its id counts once.
        """
        match event:
            case ReviewRequest():
                return self._request(event)
            case ReviewVerdict():
                return self._verdict(event, message_id)
            case ReviewClosed():
                return self._close(event)

    def _request(self, request: ReviewRequest) -> Applied:
        if self.get(request.request) is not None:
            return Applied("repeated")
        review = Review(request, verdict=self._early.pop(request.request, None))
        if (closed := self._orphans.pop(request.request, None)) is not None:
            self._keep_closed(review, closed)
        else:
            self._open[request.request] = review
        return Applied("new")

    def _verdict(self, verdict: ReviewVerdict, message_id: str) -> Applied:
        if message_id in self._ids:
            return Applied("repeated")
        self._ids[message_id] = None
        _bound(self._ids, KEPT_IDS)
        if verdict.reward is not None and abs(verdict.reward) > MAX_REWARD:
            wanted = f"wanted a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
            return Applied("refused", f"its reward is {verdict.reward:g}, {wanted}")
        if (closed := self.closing(verdict.request)) is not None:
            return Applied("refused", f"it is closed: {in_words(closed)}")
        review = self.get(verdict.request)
        earlier = self._early.get(verdict.request) if review is None else review.verdict
        if earlier is not None:
            return Applied("refused", f"there is a verdict already: {in_words(earlier)}")
        if review is not None:
            review.verdict = verdict
            return Applied("new")
        self._early[verdict.request] = verdict
        _bound(self._early, KEPT_EARLY)
        return Applied("unknown", f"no request {verdict.request} is known; the verdict counts if it is asked again")

    def _close(self, closed: ReviewClosed) -> Applied:
        if (earlier := self.closing(closed.request)) is not None:
            return Applied("repeated" if earlier == closed else "refused", f"it is closed: {in_words(earlier)}")
        review = self._open.pop(closed.request, None)
        if review is None:
            self._orphans[closed.request] = closed
            _bound(self._orphans, KEPT_CLOSED)
            return Applied("unknown", f"no request {closed.request} is known")
        self._keep_closed(review, closed)
        return Applied("new")

    def _keep_closed(self, review: Review, closed: ReviewClosed) -> None:
        review.closed = closed
        self._closed[closed.request] = review
        _bound(self._closed, KEPT_CLOSED)


def in_words(decided: ReviewVerdict | ReviewClosed) -> str:
    """Return a verdict, or what counted, in a few words."""
    what = decided.verdict if decided.reward is None else f"{decided.verdict} {decided.reward:g}"
    if isinstance(decided, ReviewClosed) and decided.how == "timeout":
        return f"{what}, the default, for nobody answered in time"
    return f"{what} by {decided.by}" if decided.by else what


def _bound(kept: OrderedDict[str, T], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
