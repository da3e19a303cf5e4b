"""Divides the sequences of an optimizer step among ranks and into micro-batches, by their lengths alone.

A unit is a sequence, or the two sequences of a pair, which must stay together. ``lengths`` are int64 ``[units, 2]``, 0
for a missing second sequence. Every rank computes the same division, so the division is never transmitted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from trinity_mq.experience.ragged import Indexes

ATTENTION_SHARE = 1 / 12
"""Cost of the attention between two tokens, divided by the cost of a token's products with the weights, times the
hidden size. A layer takes 2 x length x hidden against 24 x hidden^2 operations per token (causal, feed-forward of 4 x
hidden).
"""


def divide(
    lengths: Indexes, max_tokens: int, *, packed: bool = False, ranks: int = 1, hidden_size: int = 1024
) -> list[list[Indexes]]:
    """Return the micro-batches of each rank, as indexes of units. Every rank has the same number of micro-batches.

    Args:
        lengths: Tokens of the sequences of each unit, ``[units, 2]``.
        max_tokens: Maximum number of tokens in a micro-batch, see :func:`pack` and :func:`pad`. A longer unit gets its
            own micro-batch.
        packed: Whether a micro-batch is a single row of concatenated sequences, instead of one padded row per sequence.
        ranks: Number of processes that share the work.
        hidden_size: Width of the model, which determines the cost of attention.

    Returns:
        For each rank a list of micro-batches, the largest or longest first. A rank with fewer micro-batches gets empty
        micro-batches at the end.
    """
    parts = balance(costs(lengths, hidden_size), ranks) if ranks > 1 else [np.arange(len(lengths))]
    divisions = []
    for part in parts:
        rank_lengths = lengths[part]
        batches = pack(rank_lengths.sum(1), max_tokens) if packed else pad(rank_lengths, max_tokens)
        divisions.append([part[batch] for batch in batches])
    most = max(map(len, divisions))
    return [batches + [np.zeros(0, dtype=np.int64)] * (most - len(batches)) for batches in divisions]


def costs(lengths: Indexes, hidden_size: int) -> npt.NDArray[np.float64]:
    """Return the cost of each unit: ``sum of length + ATTENTION_SHARE length^2 / hidden_size`` over its sequences."""
    result: npt.NDArray[np.float64] = (lengths + ATTENTION_SHARE / hidden_size * lengths.astype(np.float64) ** 2).sum(1)
    return result


def balance(costs: npt.NDArray[np.float64], ranks: int) -> list[Indexes]:
    """Return the units of each rank, ascending. The costliest unit is assigned first, and each unit goes to the rank
    with the lowest load.

    The loads of the ranks differ by at most the cost of one unit, and the largest load is at most 4/3 of the optimum
    (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for unit in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        parts[rank].append(unit)
        heapq.heappush(loads, (load + float(costs[unit]), rank))
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def pack(sizes: Indexes, max_tokens: int) -> list[Indexes]:
    """Divide units into packed rows of at most ``max_tokens``, by best fit decreasing: the largest unit first, each
    into the row that it leaves with the least room, or into a new row.

    Args:
        sizes: Tokens of each unit.
        max_tokens: Maximum number of tokens in a row. A larger unit gets its own row.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for unit in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[unit])
        at = bisect_left(rooms, (size, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(unit)
        insort(rooms, (room - size, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def pad(lengths: Indexes, max_tokens: int) -> list[Indexes]:
    """Divide units into padded micro-batches, longest first. Units of similar length share a micro-batch, which keeps
    padding low.

    Args:
        lengths: Tokens of the sequences of each unit, ``[units, 2]``.
        max_tokens: Maximum number of tokens in a micro-batch, ``sequences x longest``. A longer unit gets its own
            micro-batch.
    """
    longest = lengths.max(1, initial=0)
    order = np.argsort(-longest, kind="stable")
    sizes = (lengths > 0).sum(1)[order].cumsum()
    batches, start, before = [], 0, 0
    while start < len(order):
        room = max_tokens // int(longest[order[start]])
        end = max(start + 1, int(np.searchsorted(sizes, before + room, side="right")))
        batches.append(order[start:end])
        start, before = end, int(sizes[end - 1])
    return batches
