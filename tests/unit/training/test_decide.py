"""Which processed set decides a ticket, and from where a restart reads."""

from __future__ import annotations

from trinity_mq.messages import BatchReady
from trinity_mq.training.decide import Decider


def ready(ticket: str, op: str, chunks: int, batch: int = 1) -> BatchReady:
    return BatchReady(batch=batch, ticket=ticket, op=op, chunks=chunks)


def test_the_first_complete_set_decides_and_sets_never_mix() -> None:
    decider = Decider()
    decider.chunk("t", "x", 0, b"x0", 0)
    decider.chunk("t", "y", 0, b"y0", 1)
    decider.chunk("t", "y", 1, b"y1", 2)
    assert decider.ready(ready("t", "x", 2), 3) is None, "x lacks its second chunk"
    decision = decider.ready(ready("t", "y", 2), 4)
    assert decision is not None
    assert decision.chunks == (b"y0", b"y1")
    decider.chunk("t", "x", 1, b"x1", 5)
    assert decider.ready(ready("t", "x", 2), 6) is None, "decided is decided"
    assert decider.waiting == ["t"]


def test_repeated_chunks_and_readies_are_nothing_new() -> None:
    decider = Decider()
    decider.chunk("t", "x", 0, b"first", 0)
    decider.chunk("t", "x", 0, b"again", 1)
    decision = decider.ready(ready("t", "x", 1), 2)
    assert decision is not None
    assert decision.chunks == (b"first",)
    assert decider.ready(ready("t", "x", 1), 3) is None
    decider.consume(decision)
    assert decider.ready(ready("t", "z", 0), 4) is None
    assert decider.consumed == {"t"}


def test_resume_offset_is_the_lowest_thing_still_needed() -> None:
    decider = Decider()
    decider.chunk("a", "x", 0, b"", 0)
    first = decider.ready(ready("a", "x", 1, 1), 1)
    decider.chunk("b", "x", 0, b"", 2)
    decider.chunk("c", "x", 0, b"", 3)
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

    def play(decider: Decider, start: int) -> list[tuple[str, str]]:
        found = []
        for offset, (kind, ticket, op, n) in list(enumerate(events))[start:]:
            if kind == "chunk":
                decider.chunk(ticket, op, n, f"{ticket}{op}".encode(), offset)
            elif (decision := decider.ready(ready(ticket, op, n, 1 if ticket == "a" else 2), offset)) is not None:
                found.append((decision.ready.ticket, decision.ready.op))
        return found

    whole = Decider()
    assert play(whole, 0) == [("a", "new"), ("b", "x")]
    resumed = Decider(consumed=(), next_offset=0)
    assert play(resumed, whole.resume_offset()) == [("a", "new"), ("b", "x")]


def test_an_empty_batch_is_a_decision_without_chunks() -> None:
    decider = Decider()
    decision = decider.ready(BatchReady(batch=4, ticket="t", op="o", state="failed"), 7)
    assert decision is not None
    assert decider.peek(4) is decision
    assert decider.resume_offset() == 7
