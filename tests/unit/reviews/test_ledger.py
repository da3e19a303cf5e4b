"""Reviews from their events: one state each, whatever is repeated and in whatever order it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trinity_mq.bus import Bus, QueueGone, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import ReviewClosed, ReviewRequest, ReviewVerdict, Verdict
from trinity_mq.reviews.ledger import KEPT_CLOSED, ReviewEvent, ReviewLedger, verdict_text
from trinity_mq.reviews.stream import NoReviews, ReviewStream

TOPOLOGY = Topology("r")
IDS = [f"{number:016x}" for number in range(2)]


def request(name: str = IDS[0], deadline: float = 10.0) -> ReviewRequest:
    return ReviewRequest(request=name, batch=1, ticket="t", uid="1/0/0/0/x", asked=0.0, deadline=deadline)


def verdict(name: str = IDS[0], what: Verdict = "drop", by: str = "ann") -> ReviewVerdict:
    return ReviewVerdict(request=name, verdict=what, reward=0.5 if what == "reward" else None, by=by)


def closed(name: str = IDS[0], what: Verdict = "keep", **fields: str) -> ReviewClosed:
    return ReviewClosed(request=name, batch=1, ticket="t", verdict=what, **{"how": "timeout", **fields})


def test_the_first_verdict_counts_and_later_ones_are_told_why_not() -> None:
    ledger = ReviewLedger()
    assert ledger.apply(request(deadline=10.0), "r").taken == "new"
    assert ledger.apply(request(deadline=99.0), "r").taken == "repeated"
    assert [one.request.deadline for one in ledger] == [10.0]
    assert [one.request.request for one in ledger.pending()] == [IDS[0]]
    assert ledger.apply(verdict(), "v1").taken == "new"
    assert ledger.apply(verdict(), "v1").taken == "repeated"
    late = ledger.apply(verdict(what="keep", by="bob"), "v2")
    assert (late.taken, late.reason) == ("refused", "there is a verdict already: drop by ann")
    assert ledger.pending() == []
    assert ledger.apply(closed(what="drop", how="verdict", by="ann"), "c").taken == "new"
    after = ledger.apply(verdict(what="reward"), "v3")
    assert (after.taken, after.reason) == ("refused", "it is closed: drop by ann")


def test_closed_reviews_are_bounded() -> None:
    ledger = ReviewLedger()
    for number in range(KEPT_CLOSED + 5):
        ledger.apply(request(f"{number:016x}"), f"r{number}")
        ledger.apply(closed(f"{number:016x}"), f"c{number}")
    assert len(list(ledger)) == KEPT_CLOSED
    assert ledger.get(f"{4:016x}") is None
    assert ledger.get(f"{5:016x}") is not None


@pytest.mark.parametrize(("reward", "taken"), [(1e9, "new"), (-1e9, "new"), (1.1e9, "refused"), (-1e308, "refused")])
def test_a_reward_of_a_verdict_is_bounded(reward: float, taken: str) -> None:
    ledger = ReviewLedger()
    ledger.apply(request(), "r")
    given = ReviewVerdict(request=IDS[0], verdict="reward", reward=reward)
    assert ledger.apply(given, "v").taken == taken
    assert ledger.apply(verdict(), "w").taken == ("new" if taken == "refused" else "refused")


def test_a_verdict_has_a_reward_where_it_says_so_and_only_there() -> None:
    with pytest.raises(ValidationError, match="needs a number"):
        ReviewVerdict(request=IDS[0], verdict="reward")
    with pytest.raises(ValidationError, match="others none"):
        ReviewVerdict(request=IDS[0], verdict="keep", reward=1.0)
    assert verdict_text(closed()) == "keep, the default, because nobody answered in time"


Events = list[tuple[ReviewEvent, str]]


@st.composite
def streams(draw: st.DrawFn) -> Events:
    makers = (request, verdict, closed)
    found: Events = []
    for number in range(draw(st.integers(1, 14))):
        name, kind = draw(st.sampled_from(IDS)), draw(st.integers(0, 2))
        if kind == 1:
            made: ReviewEvent = verdict(name, draw(st.sampled_from(["keep", "drop", "reward"])), f"p{number}")
        elif kind == 2:
            made = closed(name, draw(st.sampled_from(["keep", "drop"])))
        else:
            made = request(name, float(number))
        found.append((made, f"m{number}" if kind == 1 else f"{makers[kind].__name__}-{name}"))
        if draw(st.booleans()):
            found.append(draw(st.sampled_from(found)))
    return found


def state(events: Events) -> dict[str, object]:
    ledger = ReviewLedger()
    for event, message_id in events:
        ledger.apply(event, message_id)
    reviews = {review.request.request: (review.request, review.verdict, review.closed) for review in ledger}
    return {name: (reviews.get(name), ledger.closing(name)) for name in IDS}


@given(streams())
def test_what_counts_follows_from_the_firsts(events: Events) -> None:
    """A model in four lines agrees, for every order."""
    found = state(events)
    for name in IDS:
        mine = [event for event, _ in events if event.request == name]
        first_closed = next((n for n, event in enumerate(mine) if isinstance(event, ReviewClosed)), len(mine))
        asked = next((event for event in mine if isinstance(event, ReviewRequest)), None)
        given_ = next((event for event in mine[:first_closed] if isinstance(event, ReviewVerdict)), None)
        end = mine[first_closed] if first_closed < len(mine) else None
        assert found[name] == (None if asked is None else (asked, given_, end), end)


@given(streams(), st.integers(0, 30))
def test_a_stream_read_again_from_its_beginning_changes_nothing(events: Events, cut: int) -> None:
    assert state(events) == state(events[:cut] + events)


# -- the stream as a reader follows it


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    made = MemoryBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
    await made.connect()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("acts", "error", "said"),
    [
        pytest.param("", NoReviews, "none of its operators requests reviews", id="nobody asks"),
        pytest.param("deletes it", QueueGone, TOPOLOGY.review.name, id="the stream is deleted"),
        pytest.param("fails", KeyError, "mine", id="an error of the block comes out as it is"),
    ],
)
async def test_following_ends(bus: Bus, acts: str, error: type[Exception], said: str) -> None:
    if acts:
        await bus.declare(TOPOLOGY.review)

    async def look() -> None:
        async with ReviewStream(bus, TOPOLOGY).following():
            if acts == "fails":
                raise KeyError("mine")
            if acts:
                await bus.delete(TOPOLOGY.review.name)
                await asyncio.Event().wait()

    with pytest.raises(error, match=said):
        await asyncio.wait_for(look(), 10)
