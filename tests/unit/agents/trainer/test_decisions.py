"""Which processed set decides a ticket, and from where a restart reads."""

from __future__ import annotations

import pytest

from trinity_agents.trainer.decisions import TicketDecider, TicketDecision
from trinity_mq.messages import BatchReady
from trinity_mq.transport.ready_stream import Chunk


class Story:
    """A decider, and what came of the words of a story.

    The letters a, b, c name the tickets of batches 1, 2, 3. ``a/x.0`` is the first chunk of set x, ``a/x=2`` says that
    the set has two chunks, ``a/x!failed`` that processing failed; ``-a`` consumes what a was decided as, or repaired.
    """

    def __init__(self, words: str = "", decider: TicketDecider | None = None) -> None:
        self.decider = decider or TicketDecider()
        self.decisions: dict[str, TicketDecision] = {}
        self.offset = 0
        self.told: list[str] = []
        self.resume_offsets: list[int] = []
        self.play(words)

    def play(self, words: str, start: int = 0) -> Story:
        for word in words.split()[start:]:
            if word.startswith("-"):
                self.decider.consume(self.decisions[word[1:]])
            else:
                self._receive(word)
                self.offset += 1
            self.resume_offsets.append(self.decider.resume_offset())
        return self

    def _receive(self, word: str) -> None:
        name, _, rest = word.partition("/")
        batch, op = "abcdefgh".index(name) + 1, rest[0]
        if rest[1] == ".":
            self.decider.chunk(Chunk(name, op, int(rest[2:]), rest.encode(), offset=self.offset))
            return
        counted = {"chunks": int(rest[2:])} if rest[1] == "=" else {"state": rest[2:]}
        decision = self.decider.ready(BatchReady(batch=batch, ticket=name, op=op, **counted), self.offset)
        if decision is not None:
            self.decisions[name] = decision
            bodies = [chunk.body.decode() for chunk in decision.chunks]
            self.told.append(f"{name}/{op}:{','.join(bodies)}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param("a/x.0 a/y.0 a/y.1 a/x=2 a/y=2 a/x.1 a/x=2", "a/y:y.0,y.1", id="sets never mix"),
        pytest.param("a/x=2 a/x.0 a/x.1 a/x=2", "a/x:x.0,x.1", id="told again when it is complete"),
        pytest.param("a/x!failed", "a/x:", id="failed"),
    ],
)
def test_the_first_complete_set_decides_and_sets_never_mix(words: str, told: str) -> None:
    story = Story(words)
    assert story.told == [told]
    assert story.decider.waiting == ["a"]


def test_repeated_chunks_and_readies_are_nothing_new() -> None:
    story = Story("a/x.0 a/x.0 a/x=1 a/x=1 -a a/z=0")
    assert story.told == ["a/x:x.0"]
    assert set(story.decider.consumed) == {"a"}
    assert story.resume_offsets[-1] == 5


def test_resume_offset_is_the_lowest_thing_still_needed() -> None:
    story = Story("a/x.0 a/x=1 b/x.0 c/x.0 c/x=1 -a b/x=1 -b -c")
    assert story.resume_offsets == [0, 0, 0, 0, 0, 2, 2, 3, 6], "b is undecided; then c is decided and not trained"
    assert Story("a/x!failed").resume_offsets == [0]


def test_a_restart_from_the_resume_offset_decides_the_same() -> None:
    words = "a/o.0 a/n.0 a/n=1 b/x.0 a/o=1 b/x=1"
    whole = Story(words)
    assert whole.told == ["a/n:n.0", "b/x:x.0"]
    resumed = Story(decider=TicketDecider(next_offset=0))
    assert resumed.play(words, whole.decider.resume_offset()).told == whole.told


# -- failed, and repaired


def test_a_failed_ticket_may_be_repaired_once() -> None:
    story = Story("a/x!failed -a")
    assert (story.decider.failed, dict(story.decider.consumed), story.decider.is_settled("a")) == ({"a"}, {}, False)
    story.play("a/y.0 a/y=1 a/z.0 a/z=1 b/x.0 b/x=1")
    assert story.told == ["a/x:", "a/y:y.0", "b/x:x.0"], "once"
    assert story.decider.peek(1) is None, "the batch is progress already"
    assert story.decider.waiting == ["b"]
    assert story.decider.repaired([story.decisions["b"]]) == [story.decisions["a"]]
    story.play("-a a/w.0 a/w=1")
    assert story.decider.repaired([story.decisions["b"]]) == []
    assert (set(story.decider.consumed), story.decider.failed) == ({"a"}, set())
    assert len(story.told) == 3, "never twice"
    assert story.decider.is_settled("a")


def test_it_goes_along_with_none_that_was_on_the_stream_before_it_or_is_before_it_in_order() -> None:
    story = Story("c/x!failed -c d/x.0 d/x=1 c/y.0 c/y=1 b/x.0 b/x=1 e/x.0 e/x=1")
    repaired = {name: story.decider.repaired([story.decisions[name]]) for name in "bde"}
    assert repaired == {"d": [], "b": [], "e": [story.decisions["c"]]}, "c itself may not be consumed before b is"
    both = [story.decisions["b"], story.decisions["e"]]
    assert story.decider.repaired(both) == repaired["e"], "one of the batches of a step is enough"
    assert story.decider.repaired([both[1], *both]) == repaired["e"], "once in a step"
    assert story.decider.unused == [3]


def test_one_that_fails_once_more_is_still_to_be_repaired() -> None:
    story = Story("a/x!failed -a a/h.0 a/x!failed a/x!gone a/h=1")
    assert story.told == ["a/x:"], "the chunk of the half set was freed"
    assert story.resume_offsets[-1] == 5
    assert story.play("a/y.0 a/y=1").told[1:] == ["a/y:y.0"]


def test_repaired_and_empty_is_done_with() -> None:
    story = Story("a/x!failed -a a/y!empty -a")
    assert (story.decider.failed, set(story.decider.consumed), story.resume_offsets[-1]) == (set(), {"a"}, 2)


def test_repaired_before_it_is_consumed_as_failed_it_is_progress_first() -> None:
    story = Story("a/x!failed")
    failed = story.decisions["a"]
    story.play("a/y.0 a/y=1")
    assert story.decider.peek(1) is failed
    assert story.decider.repaired([failed]) == []
    assert (story.decider.failed, story.resume_offsets[-1]) == (set(), 0), "a restart has to decide it as failed again"
    story.decider.consume(failed)
    assert (story.decider.failed, story.decider.resume_offset()) == ({"a"}, 1), "what repairs it has still to be read"
    story.play("-a")
    assert (story.decider.failed, set(story.decider.consumed), story.resume_offsets[-1]) == (set(), {"a"}, 3)


@pytest.mark.parametrize("state", ["gone", "empty", "ready"])
def test_only_a_failed_ticket_is_repaired(state: str) -> None:
    story = Story(f"a/x!{state} a/y.0 a/y=1 -a a/z.0 a/z=1")
    assert story.told == ["a/x:"]


def test_tickets_of_long_ago_are_forgotten_and_still_count_no_more() -> None:
    story = Story(" ".join(f"{name}/x.0 {name}/x=1 -{name}" for name in "abcdefg"))
    story.decider.settle(4, 7, lambda: {"b"})
    assert story.decider.consumed == {"e": 5, "f": 6, "g": 7, "b": 7}
    for batch, ticket in ((1, "a"), (4, "d"), (3, "another ticket of an old batch")):
        story.decider.chunk(Chunk(ticket, "late", 0, b"", offset=20, batch=batch))
        assert story.decider.resume_offset() == 21, "a restart need not read it"
        story.decider.chunk(Chunk(ticket, "late", 0, b"", offset=21))  # of a sender that does not say its batch
        assert story.decider.ready(BatchReady(batch=batch, ticket=ticket, op="late", chunks=1), 22) is None
        assert story.decider.resume_offset() == 23
    again = Story(decider=TicketDecider(story.decider.consumed, 23, (), settled=story.decider.settled))
    again.offset = 23
    assert again.play("d/z.0 d/z=1 h/x.0 h/x=1").told == ["h/x:x.0"]


def test_a_failed_ticket_may_be_repaired_however_old_it_is() -> None:
    story = Story("a/x!failed -a " + " ".join(f"{name}/x.0 {name}/x=1 -{name}" for name in "bcde"))
    story.decider.settle(5, 5, tuple)
    story.play("a/y.0 a/y=1 -a a/z.0 a/z=1")
    assert story.told[-1] == "a/y:y.0"
    story.decider.settle(5, 5, tuple)
    assert not story.decider.consumed
    assert story.play("a/z.0 a/z=1").told[-1] == "a/y:y.0"
