"""Which processed set decides a ticket, and from where a restart reads."""

from __future__ import annotations

from trinity_agents.trainer.decisions import TicketDecider, TicketDecision
from trinity_mq.messages import BatchReady
from trinity_mq.transport.ready_stream import Chunk


def ready(ticket: str, op: str, chunks: int, batch: int = 1) -> BatchReady:
    return BatchReady(batch=batch, ticket=ticket, op=op, chunks=chunks)


def test_the_first_complete_set_decides_and_sets_never_mix() -> None:
    decider = TicketDecider()
    decider.chunk(Chunk("t", "x", 0, b"x0", offset=0))
    decider.chunk(Chunk("t", "y", 0, b"y0", offset=1))
    decider.chunk(Chunk("t", "y", 1, b"y1", offset=2))
    assert decider.ready(ready("t", "x", 2), 3) is None, "x lacks its second chunk"
    decision = decider.ready(ready("t", "y", 2), 4)
    assert decision is not None
    assert [chunk.body for chunk in decision.chunks] == [b"y0", b"y1"]
    decider.chunk(Chunk("t", "x", 1, b"x1", offset=5))
    assert decider.ready(ready("t", "x", 2), 6) is None, "decided is decided"
    assert decider.waiting == ["t"]


def test_repeated_chunks_and_readies_are_nothing_new() -> None:
    decider = TicketDecider()
    decider.chunk(Chunk("t", "x", 0, b"first", offset=0))
    decider.chunk(Chunk("t", "x", 0, b"again", offset=1))
    decision = decider.ready(ready("t", "x", 1), 2)
    assert decision is not None
    assert [chunk.body for chunk in decision.chunks] == [b"first"]
    assert decider.ready(ready("t", "x", 1), 3) is None
    decider.consume(decision)
    assert decider.ready(ready("t", "z", 0), 4) is None
    assert set(decider.consumed) == {"t"}


def test_resume_offset_is_the_lowest_thing_still_needed() -> None:
    decider = TicketDecider()
    decider.chunk(Chunk("a", "x", 0, b"", offset=0))
    first = decider.ready(ready("a", "x", 1, 1), 1)
    decider.chunk(Chunk("b", "x", 0, b"", offset=2))
    decider.chunk(Chunk("c", "x", 0, b"", offset=3))
    second = decider.ready(ready("c", "x", 1, 3), 4)
    assert first is not None
    assert second is not None
    assert decider.resume_offset() == 0
    decider.consume(first)
    assert decider.resume_offset() == 2, "b is undecided"
    third = decider.ready(ready("b", "x", 1, 2), 5)
    assert third is not None
    decider.consume(third)
    assert decider.resume_offset() == 3, "c is decided and not trained"
    decider.consume(second)
    assert decider.resume_offset() == 6


def test_a_restart_from_the_resume_offset_decides_the_same() -> None:
    events = [
        ("chunk", "a", "old", 0),
        ("chunk", "a", "new", 0),
        ("ready", "a", "new", 1),
        ("chunk", "b", "x", 0),
        ("ready", "a", "old", 1),
        ("ready", "b", "x", 1),
    ]

    def play(decider: TicketDecider, start: int) -> list[tuple[str, str]]:
        found = []
        for offset, (kind, ticket, op, n) in list(enumerate(events))[start:]:
            if kind == "chunk":
                decider.chunk(Chunk(ticket, op, n, f"{ticket}{op}".encode(), offset=offset))
            elif (decision := decider.ready(ready(ticket, op, n, 1 if ticket == "a" else 2), offset)) is not None:
                found.append((decision.ready.ticket, decision.ready.op))
        return found

    whole = TicketDecider()
    assert play(whole, 0) == [("a", "new"), ("b", "x")]
    resumed = TicketDecider(next_offset=0)
    assert play(resumed, whole.resume_offset()) == [("a", "new"), ("b", "x")]


def test_an_empty_batch_is_a_decision_without_chunks() -> None:
    decider = TicketDecider()
    decision = decider.ready(BatchReady(batch=4, ticket="t", op="o", state="failed"), 7)
    assert decision is not None
    assert decider.peek(4) is decision
    assert decider.resume_offset() == 7


def a_failed_one(batch: int = 1, ticket: str = "t") -> TicketDecider:
    """A decider at offset 1 that has consumed a failed batch."""
    decider = TicketDecider()
    decision = decider.ready(BatchReady(batch=batch, ticket=ticket, op="x", state="failed"), 0)
    assert decision is not None
    decider.consume(decision)
    return decider


def whole(decider: TicketDecider, ticket: str, op: str, batch: int, offset: int) -> TicketDecision | None:
    """A set of one chunk: two messages."""
    decider.chunk(Chunk(ticket, op, 0, op.encode(), offset=offset))
    return decider.ready(ready(ticket, op, 1, batch), offset + 1)


def consume(decider: TicketDecider, first: int, last: int) -> None:
    """Decide and consume the batches from ``first`` to ``last``."""
    for batch in range(first, last + 1):
        found = whole(decider, f"t{batch}", "x", batch, 2 * batch)
        assert found is not None
        decider.consume(found)


def test_a_failed_ticket_may_be_repaired_once() -> None:
    decider = a_failed_one()
    assert decider.failed == {"t"}
    assert not decider.consumed
    assert not decider.is_settled("t")
    repaired = whole(decider, "t", "again", 1, 1)
    assert repaired is not None
    assert [chunk.body for chunk in repaired.chunks] == [b"again"]
    assert whole(decider, "t", "third", 1, 3) is None, "once"
    assert decider.peek(1) is None, "the batch is progress already"
    assert decider.waiting == []
    later = whole(decider, "u", "x", 2, 5)
    assert later is not None
    assert decider.repaired(later) == [repaired]
    decider.consume(repaired)
    assert decider.repaired(later) == []
    assert set(decider.consumed) == {"t"}
    assert decider.failed == set()
    assert whole(decider, "t", "fourth", 1, 7) is None, "never twice"
    assert decider.is_settled("t")


def test_it_goes_along_with_none_that_was_on_the_stream_before_it_or_is_before_it_in_order() -> None:
    decider = a_failed_one(batch=3)
    before = whole(decider, "b4", "x", 4, 1)
    repaired = whole(decider, "t", "again", 3, 3)
    earlier = whole(decider, "b2", "x", 2, 5)
    after = whole(decider, "b5", "x", 5, 7)
    assert before is not None
    assert earlier is not None
    assert after is not None
    assert decider.repaired(before) == []
    assert decider.repaired(earlier) == [], "the failed one itself may not be consumed yet"
    assert decider.repaired(after) == [repaired]
    assert decider.unused == [3]


def test_one_that_fails_once_more_is_still_to_be_repaired() -> None:
    decider = a_failed_one()
    decider.chunk(Chunk("t", "half", 0, b"", offset=1))
    for offset, state in ((2, "failed"), (3, "gone")):
        assert decider.ready(BatchReady(batch=1, ticket="t", op="x", state=state), offset) is None
    assert decider.ready(ready("t", "half", 1), 4) is None, "its chunk was freed"
    assert decider.resume_offset() == 5
    assert whole(decider, "t", "again", 1, 5) is not None


def test_repaired_and_empty_is_done_with() -> None:
    decider = a_failed_one()
    found = decider.ready(BatchReady(batch=1, ticket="t", op="y", state="empty"), 1)
    assert found is not None
    decider.consume(found)
    assert (decider.failed, set(decider.consumed)) == (set(), {"t"})


def test_repaired_before_it_is_consumed_as_failed_it_is_progress_first() -> None:
    decider = TicketDecider()
    failed = decider.ready(BatchReady(batch=1, ticket="t", op="x", state="failed"), 0)
    repaired = whole(decider, "t", "again", 1, 1)
    assert failed is not None
    assert repaired is not None
    assert decider.peek(1) is failed
    assert decider.repaired(failed) == []
    assert decider.failed == set(), "a restart has to decide it as failed again"
    assert decider.resume_offset() == 0
    decider.consume(failed)
    assert decider.failed == {"t"}
    assert decider.resume_offset() == 1, "what repairs it has still to be read"
    decider.consume(repaired)
    assert (decider.failed, set(decider.consumed), decider.resume_offset()) == (set(), {"t"}, 3)


def test_only_a_failed_ticket_is_repaired() -> None:
    for state in ("gone", "empty", "ready"):
        decider = TicketDecider()
        found = decider.ready(BatchReady(batch=1, ticket="t", op="x", state=state), 0)  # type: ignore[arg-type]
        assert found is not None
        assert whole(decider, "t", "again", 1, 1) is None
        decider.consume(found)
        assert whole(decider, "t", "again", 1, 3) is None


def test_tickets_of_long_ago_are_forgotten_and_still_count_no_more() -> None:
    decider = TicketDecider()
    consume(decider, 1, 7)
    decider.settle(4, 7, lambda: {"t2"})
    assert decider.consumed == {"t5": 5, "t6": 6, "t7": 7, "t2": 7}
    for batch, ticket in ((1, "t1"), (4, "t4"), (3, "another ticket of an old batch")):
        decider.chunk(Chunk(ticket, "late", 0, b"", offset=20, batch=batch))
        assert decider.resume_offset() == 21, "a restart need not read it"
        decider.chunk(Chunk(ticket, "late", 0, b"", offset=21))  # of a sender that does not say its batch
        assert decider.ready(ready(ticket, "late", 1, batch=batch), 22) is None
        assert decider.resume_offset() == 23
    again = TicketDecider(decider.consumed, 23, (), settled=decider.settled)
    assert whole(again, "t4", "later still", 4, 23) is None
    assert whole(again, "t8", "x", 8, 25) is not None


def test_a_failed_ticket_may_be_repaired_however_old_it_is() -> None:
    decider = a_failed_one()
    consume(decider, 2, 5)
    decider.settle(5, 5, tuple)
    repaired = whole(decider, "t", "again", 1, 20)
    assert repaired is not None
    decider.consume(repaired)
    assert whole(decider, "t", "and again", 1, 22) is None
    decider.settle(5, 5, tuple)
    assert not decider.consumed
    assert whole(decider, "t", "and again", 1, 24) is None
