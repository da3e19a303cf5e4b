"""The end of a run that is read from any place on."""

from __future__ import annotations

import itertools
import json

from trinity_agents.trainer.sources.last_batch import LastBatch


def after(*batches: int, ends: int | None) -> LastBatch:
    found = LastBatch()
    for number in batches:
        found.batch(number)
    if ends is not None:
        found.set_batch_count(ends)
    return found


def test_all_batches_in_any_order_and_the_announced_number() -> None:
    for order in itertools.permutations((1, 2, 3, 4)):
        found = LastBatch()
        found.set_batch_count(4)
        for number in order[:-1]:
            found.batch(number)
        assert not found.is_complete or order[0] > 1, order
        found.batch(order[-1])
        assert found.is_complete, order
    assert not after(1, 2, 3, ends=None).is_complete
    assert not after(1, 3, ends=3).is_complete
    assert after(ends=0).is_complete
    assert not after(ends=2).is_complete


def test_what_lies_before_the_beginning_is_not_waited_for() -> None:
    assert after(7, 8, 9, ends=9).is_complete
    assert after(8, 7, 9, ends=9).is_complete
    assert not after(7, 9, ends=9).is_complete


def test_a_cut_is_passed_over() -> None:
    found = after(1, 2, ends=None)
    found.cut()
    found.batch(6)
    found.set_batch_count(6)
    assert found.is_complete


def test_a_run_that_is_extended_has_not_ended() -> None:
    found = after(1, 2, ends=2)
    found.batch(3)
    assert not found.is_complete
    found.set_batch_count(3)
    assert found.is_complete


def test_it_goes_on_from_its_state() -> None:
    found = LastBatch.restored(json.loads(json.dumps(after(1, 2, 4, ends=4).state())))
    found.batch(2)  # read again
    assert not found.is_complete
    found.batch(3)
    assert found.is_complete
