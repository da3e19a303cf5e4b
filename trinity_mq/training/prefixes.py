"""Finds token prefixes that sequences of a train step share, such as the prompt of a group of answers. Divides the
sequences so that a forward and backward pass computes each shared prefix once.

Prefixes are compared as whole token sequences: only equality counts, not their origin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trinity_mq.experience.ragged import Indexes
from trinity_mq.training.parallel.division import pad

KEPT = 0.25
"""Memory cost of a prefix position for each sequence that reads it, as a fraction of the cost of an own position. Such
a sequence keeps the position's keys and values: two of at least eight tensors of this size that a layer keeps for the
backward pass.
"""
WORTHWHILE = 0.9
"""Prefixes are shared if the work is at most this fraction of the work with one row per whole sequence."""


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each sequence: the tokens before the token that predicts its first trained token."""

    number: Indexes
    """``[sequences]``: prefix number; equal for equal prefixes."""
    lengths: Indexes
    """``[sequences]``: tokens of the prefix; may be 0."""

    @classmethod
    def of(cls, ids: Tensor, starts: Indexes, lengths: Indexes) -> Prefixes:
        """Compare the first tokens of all sequences.

        Args:
            ids: int64: tokens of all sequences.
            starts: ``[sequences]``: start of each sequence in ``ids``.
            lengths: ``[sequences]``: tokens of each prefix.
        """
        tokens, numbers = ids.numpy(), dict[bytes, int]()
        prefix_numbers = [
            numbers.setdefault(tokens[start : start + length].tobytes(), len(numbers))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return cls(np.array(prefix_numbers, dtype=np.int64), lengths)


def divide_shared(units: Indexes, lengths: Indexes, prefixes: Prefixes, max_tokens: int) -> list[Indexes] | None:
    """Return micro-batches, as indexes of units, whose sequences share prefixes. Return None if this does not save a
    tenth of the work, compared with one row per whole sequence. The work is the number of positions, padding included.

    The micro-batches hold neighbours in one of two orders: by shared prefix, or by the length of the rest of the
    sequence. The order with less work is used.

    Args:
        units: ``[units, 2]``: a sequence, and a second sequence that has to stay with it, or -1.
        lengths: ``[sequences]``: tokens of each whole sequence.
        prefixes: Prefixes of the sequences.
        max_tokens: Maximum number of tokens in a micro-batch, padding included. A prefix counts once, plus :data:`KEPT`
            of it for each sequence with this prefix. A longer unit gets its own micro-batch.
    """
    first = units[:, 0]
    exists = units >= 0
    whole = np.where(exists, lengths[units], 0)
    rests = np.where(exists, lengths[units] - prefixes.lengths[units], 0)
    plain = pad(whole, max_tokens)
    work = sum(int(exists[part].sum()) * int(whole[part].max()) for part in plain)
    longest = np.zeros(int(prefixes.number.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(longest, prefixes.number[first], whole.max(1))
    by_prefix = np.lexsort((-rests.max(1), prefixes.number[first], -longest[prefixes.number[first]]))
    by_rest = np.argsort(-rests.max(1), kind="stable")
    divisions = [_fill(order, units, rests, prefixes, max_tokens) for order in (by_prefix, by_rest)]
    parts, needed = min(divisions, key=lambda division: division[1])
    return parts if needed <= WORTHWHILE * work else None


def _fill(
    order: Indexes, units: Indexes, rests: Indexes, prefixes: Prefixes, max_tokens: int
) -> tuple[list[Indexes], int]:
    """Return micro-batches of neighbours in ``order``, and their total number of positions."""
    parts: list[Indexes] = []
    work = start = 0
    rows = longest = prefix = 0
    prefixes_in_batch: set[int] = set()
    exists = units >= 0
    prefix_lengths = np.where(exists, prefixes.lengths[units], 0).max(1).tolist()
    numbers = np.where(exists, prefixes.number[units], prefixes.number[units[:, :1]]).tolist()
    sizes, rest = exists.sum(1).tolist(), rests.max(1).tolist()
    for place, unit in enumerate(order.tolist()):
        first_prefix, second_prefix = numbers[unit]
        prefix_count = (
            len(prefixes_in_batch)
            + (first_prefix not in prefixes_in_batch)
            + (second_prefix != first_prefix and second_prefix not in prefixes_in_batch)
        )
        wide, tall, height = max(longest, rest[unit]), max(prefix, prefix_lengths[unit]), rows + sizes[unit]
        if rows and height * wide + (prefix_count + KEPT * height) * tall > max_tokens:
            parts.append(order[start:place])
            work += rows * longest + len(prefixes_in_batch) * prefix
            start, prefixes_in_batch, height = place, set(), sizes[unit]
            wide, tall = rest[unit], prefix_lengths[unit]
        rows, longest, prefix = height, wide, tall
        prefixes_in_batch.update((first_prefix, second_prefix))
    parts.append(order[start:])
    return parts, work + rows * longest + len(prefixes_in_batch) * prefix
