"""Slices count as lost only where no queue can hold them and no runner has them (dispatch/loss_repair.py)."""

from __future__ import annotations

import random

import pytest

from trinity_mq.dispatch.loss_repair import LONGEST_PATIENCE, LOOK_SECONDS, LOST_AFTER, LostSlices, SliceName


def names(count: int, ticket: str = "t") -> list[SliceName]:
    return [(ticket, task, 0) for task in range(count)]


def first_loss(
    looks: LostSlices, waiting: list[SliceName], capacity: int, *, begin: float = 0.0, seconds: float = 300.0
) -> tuple[float, list[SliceName]]:
    """Look while nothing changes; return when slices were found to be lost, and which; infinity: none were."""
    now = begin
    while now <= begin + seconds:
        if lost := looks.look(now, waiting, capacity):
            return now - begin, lost
        now += LOOK_SECONDS
    return float("inf"), []


@pytest.mark.parametrize("capacity", [5, 6, 1000])
def test_slices_that_wait_in_a_queue_are_not_lost_however_long(capacity: int) -> None:
    assert first_loss(LostSlices(), names(5), capacity, seconds=24 * 3600) == (float("inf"), [])


def test_of_a_queue_that_holds_some_the_oldest_are_lost() -> None:
    looks = LostSlices()
    looks.look(0.0, names(4, "old"), 4)
    _, lost = first_loss(looks, [*names(6, "new"), *names(4, "old")], 6, begin=LOOK_SECONDS)
    assert lost == names(4, "old")


def test_what_a_queue_held_before_it_was_purged_does_not_delay_the_repair() -> None:
    looks = LostSlices()
    assert first_loss(looks, names(50), 50, seconds=100.0)[1] == []
    seconds, lost = first_loss(looks, names(50), 0, begin=110.0)
    assert lost == names(50)
    assert seconds <= LOST_AFTER + LOOK_SECONDS


def test_one_look_at_which_a_queue_seems_empty_is_no_evidence() -> None:
    looks, now = LostSlices(), 0.0
    for number in range(200):
        assert looks.look(now, names(5), 0 if number % 5 == 0 else 5) == []
        now += LOOK_SECONDS


def test_nothing_is_lost_in_the_first_seconds_after_an_outage() -> None:
    looks = LostSlices()
    for number in range(5):
        looks.look(number * LOOK_SECONDS, names(5), 0)
    looks.reset()
    seconds, _ = first_loss(looks, names(5), 0, begin=20.0)
    assert seconds >= LOST_AFTER


def test_the_patience_doubles_with_each_time_and_is_bounded() -> None:
    looks, waits, now = LostSlices(), list[float](), 0.0
    for _ in range(7):
        seconds, lost = first_loss(looks, names(2), 0, begin=now)
        waits.append(seconds)
        looks.sent_again(lost)
        now += seconds + LOOK_SECONDS
    assert waits == [15.0, 30.0, 60.0, 120.0, 240.0, 240.0, 240.0]
    assert waits[-1] == LONGEST_PATIENCE
    looks.keep(())
    assert first_loss(looks, names(2), 0, begin=now + 1000)[0] == LOST_AFTER


@pytest.mark.parametrize("seed", range(40))
def test_a_busy_queue_loses_nothing_whatever_the_looks_miss(seed: int) -> None:
    """Slices stream through a queue; looks see heartbeats, results and the queue at moments of their own."""
    draw = random.Random(seed)
    looks, queue, done = LostSlices(), list[SliceName](), set[SliceName]()
    taken: dict[SliceName, float] = {}
    published = list[SliceName]()
    slots, duration = draw.choice([1, 8, 64]), draw.choice([0.1, 1.0, 5.0, 30.0])
    heard: list[tuple[float, set[SliceName]]] = [(0.0, set())]
    for tick in range(3000):
        now = tick * 0.1
        if len(queue) < 200 and draw.random() < 0.1:
            fresh = [("t", len(published) + n, 0) for n in range(draw.randint(1, 60))]
            published += fresh
            queue += fresh
        for name, since in list(taken.items()):
            if now - since >= duration:
                done.add(name)
                del taken[name]
        while queue and len(taken) < slots:
            taken[queue.pop(0)] = now
        if tick % 20 == 0:
            heard.append((now, set(taken)))
        if tick % 25 == 0:
            depth = len(queue)
            held = next(slices for at, slices in reversed(heard) if at <= now - draw.uniform(0.0, 0.2) or at == 0.0)
            waiting = [name for name in published if name not in done and name not in held]
            assert looks.look(now, waiting, depth) == []
    assert len(done) > 5
