"""Sequences are divided among ranks and into micro-batches: all of them, evenly, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.experience.ragged import Indexes
from trinity_mq.training.parallel.division import balance, costs, divide, pack, pad

UNITS = st.lists(st.tuples(st.integers(2, 300), st.one_of(st.just(0), st.integers(2, 300))), max_size=60)
"""Lengths of single sequences, and of pairs."""


def table(units: list[tuple[int, int]]) -> Indexes:
    return np.array(units, dtype=np.int64).reshape(-1, 2)


@given(UNITS, st.integers(1, 5), st.integers(1, 700), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_every_unit_is_in_one_micro_batch_within_the_budget(
    units: list[tuple[int, int]], ranks: int, budget: int, packed: bool
) -> None:
    lengths = table(units)
    parts = divide(lengths, budget, packed=packed, ranks=ranks)
    assert len(parts) == ranks
    assert len(set(map(len, parts))) == 1, "ranks take part in each other's passes"
    batches = [batch for part in parts for batch in part]
    assert sorted(unit for batch in batches for unit in batch.tolist()) == list(range(len(units)))
    for batch in batches:
        mine = lengths[batch]
        tokens = mine.sum() if packed else (mine > 0).sum() * mine.max(initial=0)
        assert tokens <= budget or len(batch) == 1
    for part in parts:
        sizes = [len(batch) for batch in part]
        assert sizes == sorted(sizes, key=lambda size: size == 0), "empty ones come last"
    busiest = max(sum(len(batch) > 0 for batch in part) for part in parts)
    assert len(parts[0]) == busiest, "no more empty ones than it takes"


@given(UNITS, st.integers(1, 5), st.integers(16, 4096))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_ranks_differ_by_at_most_one_unit(units: list[tuple[int, int]], ranks: int, hidden_size: int) -> None:
    each = costs(table(units), hidden_size)
    loads = [each[part].sum() for part in balance(each, ranks)]
    largest = each.max(initial=0.0)
    assert max(loads) - min(loads) <= largest * (1 + 1e-9)
    assert max(loads) <= (each.sum() / ranks + largest) * (1 + 1e-9)


def test_attention_makes_a_long_sequence_cost_more_than_its_tokens() -> None:
    each = costs(table([(12000, 0), (6000, 6000)]), 1000)
    assert each.tolist() == [12000 + 12000**2 / 12000, 12000 + 2 * 6000**2 / 12000]
    (alone, others) = balance(costs(table([(8000, 0), *[(100, 0)] * 160]), 64), 2)
    assert alone.tolist() == [0], "160 sequences of 100 tokens cost less than one of 8000"
    assert len(others) == 160


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 200))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_rows_are_packed_tightly(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    rows = pack(sizes, budget)
    loads = [int(sizes[row].sum()) for row in rows]
    small = sorted(load for load in loads if load <= budget)
    assert sum(small[:2]) > budget or len(small) < 2, "two rows that fit into one would have been one"
    assert max(lengths) == sizes[rows[0]].max(), "if memory is short, the first row shows it"


def test_best_fit_fills_the_row_with_least_room() -> None:
    assert [row.tolist() for row in pack(np.array([3, 6, 4, 7, 2]), 10)] == [[3, 0], [1, 2], [4]]
    assert [row.tolist() for row in pack(np.array([5, 20, 5]), 10)] == [[1], [0, 2]]


def test_padded_neighbours_have_similar_lengths() -> None:
    lengths = table([(3, 0), (9, 0), (4, 4), (30, 0), (5, 0)])
    assert [batch.tolist() for batch in pad(lengths, 16)] == [[3], [1], [4, 2], [0]]


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_divided_into_nothing(packed: bool) -> None:
    assert divide(table([]), 10, packed=packed, ranks=3) == [[], [], []]
    parts = divide(table([(5, 0)]), 10, packed=packed, ranks=3)
    assert [[batch.tolist() for batch in part] for part in parts] == [[[0]], [[]], [[]]]
