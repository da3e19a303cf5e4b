"""Each record once an epoch, wherever the process that reads them is killed."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from trinity_mq.data.epochs import EpochOrder

Selector = Literal["sequential", "shuffle"]


@pytest.mark.parametrize("selector", ["sequential", "shuffle"])
def test_killed_anywhere_each_record_comes_once_an_epoch(selector: Selector) -> None:
    for seed in range(60):
        dice = random.Random(seed)
        count, epochs = dice.randint(1, 9), dice.randint(1, 4)
        order, given = EpochOrder(count, selector, seed), []
        while len(given) < count * epochs:
            size = min(dice.randint(1, 7), count * epochs - len(given))
            if dice.random() < 0.4:  # killed: what was taken since the save is taken again
                order.take(dice.randint(1, 5))
                order = EpochOrder(count, selector, seed)
                order.move_to(*divmod(len(given), count))
            given += order.take(size)
            assert order.given == len(given)
        assert given == EpochOrder(count, selector, seed).take(count * epochs)
        for epoch in range(epochs):
            assert sorted(given[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_shuffle_gives_each_epoch_its_own_order_and_sequential_none() -> None:
    first, second = (EpochOrder(50, "shuffle", 3).take(100)[part] for part in (slice(50), slice(50, 100)))
    assert first != second
    assert first != sorted(first)
    assert EpochOrder(3, "sequential", 3).take(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("position", [(-1, 0), (0, 4), ("0", 0), (0, None)])
def test_a_position_that_is_none_is_refused(position: tuple[object, object]) -> None:
    with pytest.raises(ValueError, match="wanted an epoch from 0 and a cursor from 0 to 3"):
        EpochOrder(3, "shuffle", 0).move_to(*position)
