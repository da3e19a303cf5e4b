"""Sessions from their events: one state each, whatever the order of repeats, wherever a reader begins."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.gateway.ledger import Agenda, Ledger
from trinity_mq.gateway.session import Body, Event, Session
from trinity_mq.messages import (
    SampledChoice,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionRefused,
    SessionReward,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
)

HOUR = 3600.0


class Stream:
    """Events as a stream has them, and a ledger that reads along."""

    def __init__(self) -> None:
        self.ledger, self.now = Ledger(), 1000.0
        self.events: list[Event | SubmissionOutcome | SessionsTrained] = []
        self._offsets = itertools.count()

    def put(self, body: Body, message_id: str = "") -> str:
        offset = next(self._offsets)
        event = Event(offset, 100 * offset, message_id or f"m{offset}", self.now, body, 100)
        self.events.append(event)
        return self.ledger.apply(event).taken

    def open(self, session: str, **fields: object) -> None:
        given = {"idle_ttl": HOUR, "reward_ttl": 24 * HOUR, "opened": self.now, **fields}
        self.put(SessionOpened(session=session, **given), f"opened-{session}")  # type: ignore[arg-type]

    def ask(self, session: str, call: str = "c0", tokens: int = 2) -> str:
        choice = SampledChoice(ids=[1] * tokens, logprobs=[0.0] * tokens, finish_reason="stop")
        made = SessionCall(session=session, call=call, at=self.now, prompt=[5], choices=[choice])
        return self.put(made, made.message_id)

    def reward(self, session: str, reward: float = 1.0, message_id: str = "", **fields: object) -> str:
        return self.put(SessionReward(session=session, reward=reward, **fields), message_id)  # type: ignore[arg-type]

    def end(self, session: str, **fields: object) -> str:
        return self.put(SessionEnd(session=session, **fields))  # type: ignore[arg-type]

    def act(self) -> list[Body]:
        """Publish what is due, as the acting gateway does."""
        due = self.ledger.due(self.now)
        for event in due:
            self.put(event)
        return list(due)

    def outcome(self, submission: str, **fields: object) -> None:
        given = {"batch": 7, "ticket": f"t-{submission}", "outcome": "finished", "completed_runs": 1, **fields}
        body = SubmissionOutcome(submission_id=submission, **given)  # type: ignore[arg-type]
        self.events.append(body)
        self.ledger.apply_outcome(body)

    def train(self, submission: str, outcome: str = "trained", step: int = 3) -> None:
        body = SessionsTrained(ticket=f"t-{submission}", outcome=outcome, generation=1, step=step, offset=9)
        self.events.append(body)
        self.ledger.apply_trained(body)

    def session(self, name: str) -> Session:
        found = self.ledger.get(name)
        assert found is not None
        return found

    def state(self, session: str) -> str:
        return self.session(session).state


def submission_of(decided: list[Body]) -> str:
    (one,) = (event for event in decided if isinstance(event, SessionsDecided))
    return one.submission


def test_rewards_replace_or_add_and_count_once_by_their_id() -> None:
    stream = Stream()
    stream.open("a")
    stream.ask("a", "c0")
    stream.ask("a", "c1")
    assert stream.reward("a", 1.0, "r1") == "new"
    assert stream.reward("a", 5.0, "r1") == "repeated"
    stream.reward("a", 0.25, "r2")
    assert stream.session("a").reward == 0.25
    stream.reward("a", 0.5, how="add")
    assert stream.session("a").reward == 0.75
    stream.reward("a", 2.0, call="c1")
    stream.reward("a", 1.0, call=1, how="add")
    stream.reward("a", 4.0, call=0, choice=0)
    assert stream.session("a").call_rewards == {("c1", None): 3.0, ("c0", 0): 4.0}
    assert stream.reward("a", 1.0, call="c9") == "refused"
    assert stream.reward("a", 1.0, call=2) == "refused"


def test_many_rewards_of_lineages_are_applied_anew_in_little_time() -> None:
    session = Session("a")
    choices = [SampledChoice(ids=[1], logprobs=[0.0])]
    bodies: list[Body] = [SessionCall(session="a", call=f"c{n}", at=1.0, choices=choices) for n in range(1000)]
    bodies += [SessionReward(session="a", reward=1.0, lineage=f"c{n % 1000}", how="add") for n in range(2000)]
    started = time.process_time()
    for offset, body in enumerate(bodies):
        session.add(Event(offset, offset, f"m{offset}", 1.0, body, 1))
    assert time.process_time() - started < 3.0
    assert session.lineage_rewards == {f"c{n}": 2.0 for n in range(1000)}


def test_many_rewards_of_a_session_are_applied_in_little_time() -> None:
    stream, rewards = Stream(), 10_000
    stream.open("a")
    started = time.process_time()
    assert [stream.reward("a", 1.0, how="add") for _ in range(rewards)] == ["new"] * rewards
    assert time.process_time() - started < 2.0
    assert stream.session("a").reward == rewards
    assert [stream.reward("a", 1.0, "m7", how="add"), stream.reward("a", 1.0, how="add")] == ["repeated", "new"]


def test_many_events_that_no_session_takes_are_refused_in_little_time() -> None:
    stream, events = Stream(), 10_000
    for number in range(events):
        assert stream.reward(f"s{number}") == "unknown"
    stream.reward("s0", 0.5)
    started = time.process_time()
    for offset in range(events):
        stream.ledger.apply_refused(SessionRefused(offset=offset, reason="no such session"))
    assert time.process_time() - started < 2.0
    assert [event.origin for event in stream.ledger.unknown_events()] == [events]
    stream.open("s0")
    stream.ledger.apply_refused(SessionRefused(offset=events, reason="refused a moment before"))
    assert (stream.session("s0").reward, stream.ledger.unknown_events()) == (0.5, [])


@pytest.mark.parametrize(
    ("opened", "asked", "ended", "why"),
    [
        ({}, True, {"outcome": "discard", "reward": 1.0}, "discarded"),
        ({}, True, {"outcome": "failed", "reason": "the sandbox died"}, "failed"),
        ({}, False, {"reward": 1.0}, "no answers"),
        ({"record": "off"}, False, {"reward": 1.0}, "not recorded"),
        ({"record": "eval"}, True, {"reward": 1.0}, "evaluation"),
    ],
)
def test_reasons_for_which_a_session_becomes_no_task(
    opened: dict[str, object], asked: bool, ended: dict[str, object], why: str
) -> None:
    stream = Stream()
    stream.open("a", **opened)
    if asked:
        stream.ask("a")
    stream.end("a", **ended)
    (decided,) = stream.act()
    assert isinstance(decided, SessionsDecided)
    assert decided.dropped == why
    assert stream.state("a") == ("evaluated" if why == "evaluation" else "dropped")
    assert stream.ledger.evaluated == ([1.0] if why == "evaluation" else [])


def test_a_group_becomes_one_task() -> None:
    stream = Stream()
    for number in range(5):
        stream.open(f"s{number}", group="g", group_size=2)
        stream.ask(f"s{number}")
    for number in (3, 1, 0, 4):
        stream.now += 1
        stream.end(f"s{number}", reward=float(number))
    decided = stream.act()
    assert [one.sessions for one in decided] == [["s3", "s1"], ["s0", "s4"]]  # type: ignore[union-attr]
    stream.end("s2", reward=1.0)
    assert stream.act() == []
    assert stream.session("s2").why == "waits for the others of group g"
    stream.now += 25 * HOUR
    stream.act()
    assert stream.state("s2") == "dropped"


def test_a_commit_lets_an_incomplete_group_go() -> None:
    stream = Stream()
    for number in range(3):
        stream.open(f"s{number}", group="g", group_size=8)
        stream.ask(f"s{number}")
        stream.end(f"s{number}", reward=float(number))
    assert stream.act() == []
    stream.ledger.apply_committed()
    (decided,) = stream.act()
    assert isinstance(decided, SessionsDecided)
    assert decided.sessions == ["s0", "s1", "s2"]


def test_a_batch_that_was_not_trained_on() -> None:
    stream = Stream()
    for session in ("a", "b"):
        stream.open(session)
        stream.ask(session)
        stream.end(session, reward=1.0)
    first, second = (one.submission for one in stream.act())  # type: ignore[union-attr]
    stream.outcome(first)
    stream.train(first, "skipped")
    assert stream.state("a") == "dropped"
    stream.outcome(second, outcome="failed", completed_runs=0, message="it does not decode")
    assert stream.state("b") == "dropped"
    assert stream.session("b").why == "it does not decode"
    stream.train(first, "trained", step=9)
    assert stream.state("a") == "trained", "a trainer that went back to its checkpoint learned from it after all"


@pytest.mark.parametrize("told", [0, 1, 2])
def test_the_outcomes_of_a_batch_come_before_and_after_what_was_trained(told: int) -> None:
    stream = Stream()
    for session in ("a", "b"):
        stream.open(session)
        stream.ask(session)
        stream.end(session, reward=1.0)
    submissions = [one.submission for one in stream.act()]  # type: ignore[union-attr]
    for number, submission in enumerate([*submissions, None]):
        if number == told:
            stream.ledger.apply_trained(SessionsTrained(ticket="t", outcome="trained", generation=1, step=1))
        if submission is not None:
            stream.outcome(submission, ticket="t")
    assert (stream.state("a"), stream.state("b")) == ("trained", "trained")


# -- any order, any reader


def random_run(seed: int) -> Stream:
    """Sessions with calls, rewards, ends and repeats at random, and all that is due published along the way."""
    draw, stream = random.Random(seed), Stream()
    names = [f"s{number}" for number in range(draw.randint(1, 6))]
    for name in names:
        group = draw.choice(["", "", "g"])
        stream.open(
            name, group=group, group_size=draw.choice([1, 2, 3]), record=draw.choice(["train"] * 4 + ["eval", "off"])
        )
    for _ in range(draw.randint(5, 60)):
        name, what = draw.choice(names), draw.random()
        stream.now += draw.choice([1.0, 60.0, 0.4 * HOUR, 2 * HOUR])
        if what < 0.35:
            stream.ask(name, f"c{draw.randrange(4)}")
        elif what < 0.6:
            stream.reward(name, draw.random(), f"r{draw.randrange(12)}-{name}", how=draw.choice(["replace", "add"]))
        elif what < 0.75:
            stream.end(name, outcome=draw.choice(["done", "done", "failed", "discard"]))
        else:
            stream.act()
            for submission, _ in stream.ledger.queued():
                if draw.random() < 0.5:
                    stream.outcome(submission, completed_runs=draw.choice([1, 1, 0]))
                    stream.train(submission, draw.choice(["trained", "trained", "skipped"]))
    return stream


def read(events: list[Event | SubmissionOutcome | SessionsTrained]) -> Ledger:
    ledger = Ledger()
    for event in events:
        if isinstance(event, SubmissionOutcome):
            ledger.apply_outcome(event)
        elif isinstance(event, SessionsTrained):
            ledger.apply_trained(event)
        else:
            ledger.apply(event)
    return ledger


def shape(ledger: Ledger) -> dict[str, tuple[object, ...]]:
    return {
        one.id: (
            one.state,
            one.why,
            one.reward,
            sorted(one.call_rewards.items(), key=str),
            one.asked,
            one.sampled_tokens,
        )
        for one in ledger
    }


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_who_reads_the_stream_anew_knows_the_same(seed: int) -> None:
    stream = random_run(seed)
    assert shape(read(stream.events)) == shape(stream.ledger)
    assert stream.ledger.over == sum(one.end is not None for one in stream.ledger.live.values())
    twice = [event for event in stream.events for _ in range(2)]
    assert shape(read(twice)) == shape(stream.ledger), "a publish whose confirm was lost is on the stream twice"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 100))
def test_what_is_carried_survives_the_beginning_of_the_stream(seed: int, where: int) -> None:
    stream = random_run(seed)
    carried = [
        Event(event.origin, 10**6 + number, event.message_id, event.at, event.body, event.size)
        for number, event in enumerate(event for one in stream.ledger.live.values() for event in one.events)
    ]
    cut = stream.events[len(stream.events) * where // 100 :]
    fresh = read(cut + carried)
    again, before = shape(fresh), shape(stream.ledger)
    assert fresh.over == sum(one.end is not None for one in fresh.live.values())
    for name in stream.ledger.live:
        if stream.ledger.live[name].batch is None:
            assert again[name] == before[name]


def test_a_decision_counts_though_retention_has_cut_the_beginning_of_one_of_its_sessions() -> None:
    stream = Stream()
    for session in ("a", "b"):
        stream.open(session, group="g", group_size=2)
        stream.ask(session)
        stream.reward(session, final=True)
    begun = next(number for number, event in enumerate(stream.events) if event.body.session == "b")  # type: ignore[union-attr]
    submission = submission_of(stream.act())
    undecided = read(stream.events[begun:])
    stream.outcome(submission)
    stream.train(submission)
    fresh = read(stream.events[begun:])
    assert fresh.get("a") is None
    assert fresh.live["b"].state == "parked"
    fresh.finish_reading()
    assert shape(fresh)["b"] == shape(stream.ledger)["b"]
    assert (fresh.live, fresh.queued(), fresh.waiting, fresh.over) == ({}, [], 0, 0)
    assert fresh.take_new_tasks() == []
    undecided.finish_reading()
    assert undecided.live["b"].state == "parked", "no batch has reported of it: its sessions are all to come"


def test_a_session_that_two_cuts_passed_over_stays_lost() -> None:
    stream = Stream()
    stream.open("s1")
    stream.end("s1")
    first, second, third = stream.ledger, Ledger(), Ledger()
    assert not first.get("s1").is_settled  # type: ignore[union-attr]
    second.remember(first)
    third.remember(second)
    for ledger in (second, third):
        session = ledger.get("s1")
        assert session is not None
        assert session.lost
        assert session.is_settled
        assert "retention has removed" in session.why


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_every_session_comes_to_one_end(seed: int) -> None:
    stream = random_run(seed)
    for _ in range(4):
        stream.now += 30 * HOUR
        stream.act()
        for submission, _ in stream.ledger.queued():
            stream.outcome(submission)
            stream.train(submission)
    decisions = [event.body for event in stream.events if isinstance(event, Event)]
    for decided in decisions:
        if isinstance(decided, SessionsDecided) and decided.submission:
            stream.train(decided.submission)
    assert stream.ledger.live == {}
    assert {one.state for one in stream.ledger} <= {"trained", "evaluated", "dropped"}
    assert stream.ledger.kept_bytes == 0


def over(stream: Stream, name: str, **fields: object) -> None:
    stream.open(name, **fields)
    stream.ask(name)
    stream.end(name, reward=1.0)


def decide(stream: Stream, *names: str) -> str:
    submission = "task-" + "-".join(names)
    return stream.put(SessionsDecided(sessions=list(names), submission=submission), f"decided-{submission}")


def tasks(ledger: Ledger) -> dict[str, list[str]]:
    return {name: [session.id for session in sessions] for name, sessions in ledger.queued()}


def test_of_two_decisions_about_a_session_the_first_counts_and_the_second_as_a_whole_does_not() -> None:
    stream = contested()
    assert tasks(stream.ledger) == {"task-a-b": ["a", "b"]}
    assert (stream.state("c"), stream.ledger.waiting) == ("parked", 2)
    assert decide(stream, "a", "b") == "repeated"
    over(stream, "d", group="g", group_size=2)
    assert decide(stream, "c", "d") == "new"
    assert tasks(stream.ledger) == {"task-a-b": ["a", "b"], "task-c-d": ["c", "d"]}


def contested() -> Stream:
    """Three sessions of a group: one decision about two of them, and another one by a gateway that was frozen."""
    stream = Stream()
    for name in "abc":
        over(stream, name, group="g", group_size=2)
    assert decide(stream, "a", "b") == "new"
    assert decide(stream, "b", "c") == "refused"
    return stream


@pytest.mark.parametrize("seed", range(20))
def test_the_first_decision_counts_in_whatever_order_copies_are_read(seed: int) -> None:
    stream = contested()
    events = [event for event in stream.events if isinstance(event, Event)]
    second = events.pop()
    copies = list("abc")
    random.Random(seed).shuffle(copies)
    carried = [event for name in copies for event in stream.ledger.live[name].events]
    for cut in range(len(events) + 1):
        fresh = read([*events[cut:], second, *carried])
        assert tasks(fresh) == {"task-a-b": ["a", "b"]}
        assert (fresh.live["c"].state, fresh.waiting) == ("parked", 2)
        assert fresh.kept_bytes == stream.ledger.kept_bytes


def test_a_decision_whose_other_sessions_are_settled_and_cut_does_not_count() -> None:
    stream = contested()
    second = stream.events[-1]
    stream.outcome("task-a-b")
    stream.train("task-a-b")
    fresh = read([second, *stream.ledger.live["c"].events])
    assert (tasks(fresh), fresh.live["c"].state) == ({}, "parked")


def test_a_decision_that_is_read_before_its_sessions_becomes_a_task() -> None:
    stream = Stream()
    over(stream, "a")
    decide(stream, "a")
    stream.outcome("task-a")
    opened, call, end, decision, outcome = stream.events
    fresh = read([decision, outcome, opened, call, end, decision])
    assert (fresh.live["a"].state, fresh.waiting) == ("batched", 1)
    fresh.apply_trained(SessionsTrained(ticket="t-task-a", outcome="trained", generation=1, step=3))
    assert (fresh.get("a").state, fresh.waiting) == ("trained", 0)  # type: ignore[union-attr]


def comparable(events: list[SessionEnd | SessionsDecided]) -> list[str]:
    return sorted(repr(event) for event in events)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_what_is_due_is_the_same_whether_all_or_only_the_changed_sessions_are_looked_at(seed: int) -> None:
    draw, stream, names = random.Random(seed), Stream(), [f"s{number}" for number in range(8)]
    for _ in range(80):
        name, what = draw.choice(names), draw.random()
        if what < 0.3:
            size = draw.choice([1, 2, 3])
            group = draw.choice(["", "g", "h"]) if size > 1 else ""
            limits = {"idle_ttl": draw.choice([5.0, 60.0]), "reward_ttl": draw.choice([20.0, 200.0])}
            stream.open(name, record=draw.choice(["train", "train", "eval"]), group=group, group_size=size, **limits)
        elif what < 0.5:
            stream.ask(name, f"c{draw.randrange(3)}")
        elif what < 0.65:
            stream.reward(name, 1.0, final=draw.random() < 0.3)
        elif what < 0.75:
            stream.end(name, outcome=draw.choice(["done", "failed"]), reward=draw.choice([None, 1.0]))
        elif what < 0.8:
            stream.ledger.apply_committed()
        elif what < 0.9:
            stream.now += draw.choice([0.5, 7.0, 100.0])
        due = stream.ledger.due(stream.now)
        alone = Agenda(stream.ledger.live)
        for session in stream.ledger.live.values():
            alone.touch(session)
        assert comparable(due) == comparable(alone.due(stream.now))
        assert comparable(stream.ledger.due(stream.now)) == comparable(due), "until it has its effect"
        for event in draw.sample(due, draw.randint(0, len(due))):
            stream.put(event)
