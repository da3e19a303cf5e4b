"""A runner whose sandbox is away: what it takes, gives back and says, on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.agents.runner.harness import Does, at_once, lived, make, results, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, send_slice
from trinity_agents.runner.circuit import LONE_ROW, MAX_TRIES, CircuitBreaker, is_infrastructure
from trinity_mq.config import CircuitBreakerConfig
from trinity_mq.messages import INFRASTRUCTURE, TaskSlice, TaskSlices
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import DeliveryHistory, envelope
from trinity_mq.testing.virtual_time import VirtualTimeLoop

LOOP = VirtualTimeLoop

AWAY = SliceOutcome(message="sandbox: connection refused (my.py:17)", failure_kind="sandbox")


def away_until(end: float, ran: list[tuple[float, TaskSlice]], seconds: float = 1.0) -> Does:
    """Return work that fails for want of a sandbox until ``end``, and notes when it began."""

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        clock = asyncio.get_running_loop().time
        ran.append((clock(), task_slice))
        await asyncio.sleep(seconds)
        return AWAY if clock() < end else an_outcome(task_slice)

    return work


async def test_the_other_lane_goes_on() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    fails = away_until(1000.0, ran)

    async def only_train(task_slice: TaskSlice) -> SliceOutcome:
        return await (fails if task_slice.lane == "train" else at_once)(task_slice)

    async with world.living(make(world, only_train)):
        for task in range(8):
            await send_slice(world, a_slice(task=task))
        await asyncio.sleep(10.0)
        await send_slice(world, a_slice(ticket="e1", task=99, lane="eval", deliver="none"))
        await asyncio.sleep(1.0)
    assert [(each.task_id, each.outcome) for each in results(world)] == [(99, "finished")]
    assert unanswered(world) == 8


async def test_a_runner_whose_own_sandbox_is_away_leaves_its_slices_to_another() -> None:
    world = World("runner.concurrency=4")
    ill, well = make(world, away_until(1e6, [])), make(world, away_until(0.0, []), name="runner-1")
    for task in range(40):
        await send_slice(world, a_slice(task=task))
    async with world.living(ill, well):
        await asyncio.sleep(60.0)
    assert sorted(each.task_id for each in results(world)) == list(range(40))
    assert {(each.outcome, each.runner) for each in results(world)} == {("finished", "runner-1")}


async def test_a_task_that_alone_fails_costs_the_others_nothing_and_fails_for_good() -> None:
    """Its sandbox cannot be made, whatever the others do."""
    world = World("runner.concurrency=2")

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1.0)
        return AWAY if task_slice.task_id == 3 else an_outcome(task_slice)

    await lived(world, make(world, work), *(a_slice(task=task) for task in range(20)), seconds=30.0)
    (bad,) = (each for each in results(world) if each.task_id == 3)
    assert (bad.outcome, bad.failure_kind, bad.message) == ("failed", "sandbox", AWAY.message)
    assert len(results(world)) == 20
    assert unanswered(world) == 0


async def test_tries_are_counted_over_all_runners_and_are_no_evidence_of_poison() -> None:
    world, ran = World("runner.concurrency=1", "broker.delivery_limit=2"), list[tuple[float, TaskSlice]]()
    for task in range(2):
        await send_slice(world, a_slice(task=task))
    for number in range(6):
        async with world.living(make(world, away_until(1e6, ran), name=f"runner-{number}")):
            await asyncio.sleep(4.0)
    pasts = [DeliveryHistory.of(each) for each in world.stored("tasks.train")]
    assert [past.suspect for past in pasts] == [0, 0]
    assert sum(past.put_back for past in pasts) == len(ran)
    assert results(world) == []


async def test_at_the_limit_of_tries_it_fails() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(1e6, ran))
    await lived(world, runner, *(a_slice(task=task) for task in range(2)), seconds=10_000)
    assert [(each.outcome, each.failure_kind) for each in results(world)] == [("failed", "sandbox")] * 2
    assert len(ran) == 2 * MAX_TRIES
    assert runner.apart.ran == [], "the broker took none back"


async def test_slices_that_came_in_one_message_are_tried_one_at_a_time() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    await send_slice(world, a_slice(task=100))
    for first in (0, 8, 16):
        slices = TaskSlices(slices=[a_slice(task=first + n) for n in range(8)])
        exchange = world.topology.exchange("tasks")
        await world.outside.publish(exchange, "train.1", envelope(slices, message_id=f"g{first}"))
    await lived(world, make(world, away_until(30.0, ran)), seconds=120.0)
    assert sorted(each.task_id for each in results(world)) == [*range(24), 100]
    assert {each.outcome for each in results(world)} == {"finished"}
    probes = [time for time, _ in ran if 5.0 < time < 30.0]
    assert len(probes) <= 3
    assert unanswered(world) == 0


@pytest.mark.parametrize("after", [0.5, 4.0, 6.3, 12.0])
async def test_drained_while_a_lane_is_paused_it_ends_in_good_order(after: float) -> None:
    world, ran = World("runner.concurrency=4"), list[tuple[float, TaskSlice]]()
    for task in range(12):
        await send_slice(world, a_slice(task=task))
    async with world.living(make(world, away_until(1e6, ran))):
        await asyncio.sleep(after)
    assert asyncio.get_running_loop().time() < after + 3.0
    assert unanswered(world) == 12
    assert all(each.deliveries_before == 0 for each in world.stored("tasks.train"))


async def test_away_from_the_broker_during_a_pause_it_goes_on_afterwards() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(30.0, ran))
    for task in range(12):
        await send_slice(world, a_slice(task=task))
    async with world.living(runner):
        await asyncio.sleep(4.0)
        world.broker.drop(runner.bus, delay=50.0)
        await asyncio.sleep(200.0)
    assert sorted({each.task_id for each in results(world)}) == list(range(12))
    assert {each.outcome for each in results(world)} == {"finished"}
    assert unanswered(world) == 0


async def test_a_slice_that_nobody_waits_for_is_no_evidence() -> None:
    world, ran = World("runner.concurrency=4"), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(1e6, ran))
    async with world.living(runner):
        for task in range(8):
            await send_slice(world, a_slice(task=task, opened_beat=10))
        await world.beat("explorer", "explorer-0", 11, open=["t1"])
        await asyncio.sleep(4.0)
        assert runner.detail().pauses == 1
        await world.beat("explorer", "explorer-0", 12, open=[])
        await send_slice(world, a_slice(ticket="t2", task=50, opened_beat=12))
        await world.beat("explorer", "explorer-0", 13, open=["t2"])
        await asyncio.sleep(3.0)
    assert {task_slice.ticket for time, task_slice in ran if time > 5.0} == {"t2"}, "the others are dropped at once"


# -- the circuit of a lane: when it opens, whom it lets through meanwhile, and which slices are tried again


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


def opened() -> CircuitBreaker:
    """Return a circuit that opened at 0.0."""
    made = circuit()
    for name in "abcd":
        assert made.begin(name, 0.0)
        assert made.end(name, away(), 0, 0.0)
    assert not made.is_closed
    return made


def test_it_opens_after_a_row_of_failures_and_says_why() -> None:
    made = circuit()
    for number, name in enumerate("abcd", 1):
        assert made.is_closed
        assert made.begin(name, 1.0)
        assert made.end(name, away(), 0, 1.0)
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
        made.end(str(number), outcome, 0, 0.0)
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
        assert made.end("a", away(), 1, now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 40.0, 40.0]
    assert made.pauses == 1
    now += 40.0
    assert made.begin("b", now)
    made.end("b", WELL, 0, now)
    for name in "cdef":
        made.end(name, away(), 0, now)
    assert made.seconds_left(now) == 5.0
    assert made.pauses == 2


@pytest.mark.parametrize("outcome", [SLOW, BUG, FINAL, None])
def test_a_probe_that_says_nothing_leaves_room_for_another_at_once(outcome: SliceOutcome | None) -> None:
    made = opened()
    assert made.begin("a", 5.0)
    assert not made.end("a", outcome, 0, 6.0)
    assert not made.is_closed
    assert made.begin("b", 6.0)
    assert made.probes == 1


def test_what_was_under_way_when_it_opened_makes_no_pause_longer_but_may_close_it() -> None:
    made = opened()
    assert made.end("e", away(), 0, 3.0)
    assert made.seconds_left(3.0) == 2.0
    made.end("f", WELL, 0, 4.0)
    assert made.is_closed


def test_a_slice_whose_tries_others_outlived_fails_for_good() -> None:
    made = circuit()
    assert made.end("bad", away(), 0, 1.0)
    assert made.end("bad", away(), 1, 2.0), "nothing is known yet"
    made.end("good", WELL, 0, 3.0)
    assert made.end("bad", away(), 2, 4.0), "it may have been away twice"
    assert made.end("bad", away(), 3, 5.0)
    made.end("good", WELL, 0, 6.0)
    assert not made.end("bad", away(), 4, 7.0), "it is its own fault"
    assert made.is_closed


def test_one_slice_alone_opens_it_early_and_has_fewer_tries() -> None:
    made, now, tries = circuit(tries_alone=6), 0.0, 0
    while True:
        now += made.seconds_left(now) or 0.0
        assert made.begin("alone", now)
        again = made.end("alone", away(), tries, now)
        tries += 1
        if not again:
            break
        assert made.is_closed == (tries < LONE_ROW)
    assert tries == 6
    assert now == 5.0 + 10.0 + 20.0


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
        again = made.end(name, outcome, tries.get(name, 0), now)
        tries[name] = tries.get(name, 0) + (outcome is not None and is_infrastructure(outcome))
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
        assert left is None or 0.0 <= left <= 40.0 + 1e-9, "up to the rounding of the clock's sum"
