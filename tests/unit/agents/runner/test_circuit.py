"""The circuit of a lane: when it opens, whom it lets through meanwhile, and which slices are tried again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_agents.runner.circuit import LONE_ROW, MAX_TRIES, CircuitBreaker, is_infrastructure
from trinity_mq.config import CircuitBreakerConfig
from trinity_mq.messages import INFRASTRUCTURE
from trinity_mq.rollout.status import SliceOutcome

WELL = SliceOutcome(runs=[0])
BUG = SliceOutcome(message="KeyError: 'answer' (my.py:3)", failure_kind="workflow")
SLOW = SliceOutcome(message="took longer", failure_kind="timeout")
FINAL = SliceOutcome(message="sandbox: no such image", failure_kind="sandbox", retryable=False)
PARTIAL = SliceOutcome(runs=[1], message="sandbox: it went away", failure_kind="sandbox")


def away(kind: str = "sandbox") -> SliceOutcome:
    return SliceOutcome(message=f"{kind}: connection refused (my.py:17)", failure_kind=kind)


def circuit(**limits: Any) -> CircuitBreaker:
    max_tries = limits.pop("max_tries", MAX_TRIES)
    return CircuitBreaker(CircuitBreakerConfig(**{"failures": 4, **limits}), max_pause=40.0, max_tries=max_tries)


def opened(tries: int = 1) -> CircuitBreaker:
    """Return a circuit that opened at 0.0."""
    made = circuit()
    for name in "abcd":
        assert made.begin(name, 0.0)
        assert made.end(name, away(), tries, 0.0)
    assert not made.is_closed
    return made


def test_it_opens_after_a_row_of_failures_and_says_why() -> None:
    made = circuit()
    for number, name in enumerate("abcd", 1):
        assert made.is_closed
        assert made.begin(name, 1.0)
        assert made.end(name, away(), 1, 1.0)
        assert made.pauses == (number == 4)
    assert not made.admits(1.0)
    assert made.seconds_left(3.0) == 3.0
    status = made.status("train", 3.0)
    assert status is not None
    assert status.line() == (
        "the sandbox of the train lane: the last 4 tries of slices failed (sandbox: connection refused (my.py:17)); "
        "next try in 5 s"
    )


@pytest.mark.parametrize(
    ("row", "opens_at"),
    [
        *(pytest.param([away(kind)] * 4, 4, id=kind) for kind in INFRASTRUCTURE),
        *(
            pytest.param([*[away()] * 3, between, *[away()] * 4], 8, id=f"{between.failure_kind} begins a new row")
            for between in (WELL, BUG, PARTIAL)
        ),
        *(
            pytest.param([*[away()] * 3, between, between, away()], 6, id=f"{name} says nothing")
            for name, between in {"slow": SLOW, "final": FINAL, "cancelled": None}.items()
        ),
    ],
)
def test_a_row_of_failures_for_want_of_infrastructure_opens_it(row: list[SliceOutcome | None], opens_at: int) -> None:
    made = circuit()
    for number, outcome in enumerate(row, 1):
        assert made.is_closed
        made.end(str(number), outcome, 1, 0.0)
        assert made.is_closed == (number < opens_at)
    assert len(row) == opens_at


def test_after_the_pause_one_slice_is_tried_and_a_finished_run_closes_it() -> None:
    made = opened()
    assert not made.begin("a", 4.9)
    assert made.begin("a", 5.0)
    assert made.seconds_left(5.0) is None
    assert not made.begin("b", 5.0), "only one"
    assert not made.end("a", WELL, 0, 6.0)
    assert made.is_closed
    assert made.status("train", 6.0) is None
    assert all(made.begin(name, 6.0) for name in "bcd")


def test_pauses_grow_up_to_the_longest_and_begin_anew_once_it_is_closed() -> None:
    made, now, pauses = opened(), 0.0, []
    for _ in range(6):
        left = made.seconds_left(now)
        assert left is not None
        pauses.append(left)
        now += left
        assert made.begin("a", now)
        assert made.end("a", away(), 2, now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 40.0, 40.0]
    assert made.pauses == 1
    now += 40.0
    assert made.begin("b", now)
    made.end("b", WELL, 0, now)
    for name in "cdef":
        made.end(name, away(), 1, now)
    assert made.seconds_left(now) == 5.0
    assert made.pauses == 2


@pytest.mark.parametrize("outcome", [SLOW, BUG, FINAL, None])
def test_a_probe_that_says_nothing_leaves_room_for_another_at_once(outcome: SliceOutcome | None) -> None:
    made = opened()
    assert made.begin("a", 5.0)
    assert not made.end("a", outcome, 1, 6.0)
    assert not made.is_closed
    assert made.begin("b", 6.0)
    assert made.probes == 1


def test_what_was_under_way_when_it_opened_makes_no_pause_longer_but_may_close_it() -> None:
    made = opened()
    assert made.end("e", away(), 1, 3.0)
    assert made.seconds_left(3.0) == 2.0
    made.end("f", WELL, 0, 4.0)
    assert made.is_closed


def test_a_slice_whose_tries_others_outlived_fails_for_good() -> None:
    made = circuit()
    assert made.end("bad", away(), 1, 1.0)
    assert made.end("bad", away(), 2, 2.0), "nothing is known yet"
    made.end("good", WELL, 0, 3.0)
    assert made.end("bad", away(), 3, 4.0), "it may have been away twice"
    assert made.end("bad", away(), 4, 5.0)
    made.end("good", WELL, 0, 6.0)
    assert not made.end("bad", away(), 5, 7.0), "it is its own fault"
    assert made.is_closed


def test_one_slice_alone_opens_it_early_and_has_fewer_tries() -> None:
    made, now, tries = circuit(tries_alone=6), 0.0, 0
    while True:
        now += made.seconds_left(now) or 0.0
        tries += 1
        assert made.begin("alone", now)
        if not made.end("alone", away(), tries, now):
            break
        assert made.is_closed == (tries < LONE_ROW)
    assert tries == 6
    assert now == 5.0 + 10.0 + 20.0


def test_switched_off_it_never_opens_and_no_slice_is_tried_again() -> None:
    made = circuit(enable=False)
    for name in "abcdefgh":
        assert made.begin(name, 0.0)
        assert not made.end(name, away(), 1, 0.0)
    assert made.is_closed
    assert made.pauses == 0


NAMES = st.sampled_from("abcdef")
OUTCOMES = st.sampled_from([away(), away("tool"), WELL, BUG, SLOW, FINAL, PARTIAL, None])
EVENTS = st.lists(st.tuples(NAMES, OUTCOMES, st.floats(0.0, 30.0)), max_size=120)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 6))
def test_whatever_happens(events: list[tuple[str, SliceOutcome | None, float]], failures: int) -> None:
    """It opens only after a row of failures; then at most one slice is under way that began since; a success always
    closes it; it admits a slice at the latest after the longest pause; and no slice is tried beyond its limit.
    """
    made, now, under_way = circuit(failures=failures, max_tries=7, tries_alone=5), 0.0, dict[str, bool]()
    row, tries = 0, dict[str, int]()
    for name, outcome, seconds in events:
        now += seconds
        was_closed = made.is_closed
        if name not in under_way:
            admitted = made.admits(now)
            assert made.begin(name, now) == admitted
            if admitted:
                assert was_closed or not any(under_way.values()), "two probes"
                under_way[name] = not was_closed
            continue
        del under_way[name]
        tries[name] = tries.get(name, 0) + (outcome is not None and is_infrastructure(outcome))
        again = made.end(name, outcome, tries[name], now)
        if outcome is not None and outcome.runs:
            row = 0
            assert made.is_closed
            under_way = dict.fromkeys(under_way, False)
        elif outcome is not None and is_infrastructure(outcome):
            row += 1
        elif outcome is BUG and was_closed:
            row = 0
        assert again <= (outcome is not None and is_infrastructure(outcome))
        if not again:
            tries.pop(name, None)
        assert tries.get(name, 0) < 7
        if was_closed and not made.is_closed:
            assert row >= min(failures, LONE_ROW)
        left = made.seconds_left(now)
        assert (left is None) == any(under_way.values())
        assert left is None or 0.0 <= left <= 40.0
