"""The numbers of a group, computed for the few runs it has, are those of numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agents.world import experience
from trinity_mq.algorithms.estimators.runs import LARGEST, are_equal, center, deviation, run_values
from trinity_mq.experience import ExperienceBatch

NUMBERS = st.lists(st.floats(-LARGEST, LARGEST) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=300).map(np.array)


@given(NUMBERS, st.sampled_from([0, 1]))
def test_the_deviation_is_that_of_numpy_and_exactly_0_for_equal_numbers(values: np.ndarray, ddof: int) -> None:
    wanted = 0.0 if values.min() == values.max() else float(np.std(values, ddof=ddof))

    assert deviation(values, ddof) == wanted
    assert are_equal(values) == (values.min() == values.max())
    assert np.array_equal(center(values), np.zeros(len(values)) if are_equal(values) else values - np.mean(values))


def test_numbers_that_are_none_are_not_equal() -> None:
    assert not are_equal(np.array([1.0, np.nan]))
    assert not are_equal(np.array([np.nan, np.nan]))


def test_the_value_of_a_run_is_bounded_and_that_of_its_last_step() -> None:
    batch = ExperienceBatch.of([experience(0, 0), experience(0, 1), experience(1, 0)])
    alone, missing = run_values(batch, [1e300, None, -1e300])
    assert [list(group.values()) for group in alone.values()] == [[LARGEST], [-LARGEST]]
    assert missing == 1

    steps = ExperienceBatch.of([experience(0, 0), experience(0, 0)])
    assert [list(group.values()) for group in run_values(steps, [1, 2.5])[0].values()] == [[2.5]]
