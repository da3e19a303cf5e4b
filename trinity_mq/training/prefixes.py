"""Finds the tokens that sequences of a train step begin with in common, such as the prompt of a group of answers, and
divides the sequences so that a forward and backward pass computes these tokens once.

Only whole sequences of tokens are compared: what counts is that they are equal, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trinity_mq.experience.ragged import Indexes
from trinity_mq.training.parallel.division import pad

KEPT = 0.25
"""Memory that a position of a prefix costs for each sequence that reads it, as a part of a position of its own: its
keys and values, of at least eight such tensors that a layer keeps for the backward pass."""
WORTHWHILE = 0.9
"""Largest work, as a part of that with a row for each whole sequence, at which prefixes are shared."""


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each sequence: its tokens before the one that predicts its first trained token."""

    number: Indexes
    """``[sequences]``: equal where the prefixes are."""
    lengths: Indexes
    """``[sequences]``: tokens of the prefix, perhaps 0."""

    @classmethod
    def of(cls, ids: Tensor, starts: Indexes, lengths: Indexes) -> Prefixes:
        """Compare the first tokens of all sequences.

        Args:
            ids: int64: the tokens of all sequences.
            starts: ``[sequences]``: where each begins in ``ids``.
            lengths: ``[sequences]``: the tokens of its prefix.
        """
        tokens, numbers = ids.numpy(), dict[bytes, int]()
        found = [
            numbers.setdefault(tokens[start : start + length].tobytes(), len(numbers))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return cls(np.array(found, dtype=np.int64), lengths)


def divide_shared(units: Indexes, lengths: Indexes, prefixes: Prefixes, max_tokens: int) -> list[Indexes] | None:
    """Return micro-batches, as numbers of units, in which sequences share prefixes; None where that does not save a
    tenth of the work (positions, padding included) of a row for each whole sequence.

    Sequences that share a prefix are neighbours, or sequences whose rests have similar lengths: whichever is less work.

    Args:
        units: ``[units, 2]``: the sequence of each, and a second one that has to stay with it, or -1.
        lengths: ``[sequences]``: tokens of each whole sequence.
        prefixes: Of the sequences.
        max_tokens: Most tokens of a micro-batch, padding included; a prefix counts once, and :data:`KEPT` of it for
            each sequence with it. A unit that is longer has one of its own.
    """
    first = units[:, 0]
    there = units >= 0
    whole = np.where(there, lengths[units], 0)
    rests = np.where(there, lengths[units] - prefixes.lengths[units], 0)
    plain = pad(whole, max_tokens)
    work = sum(int(there[part].sum()) * int(whole[part].max()) for part in plain)
    longest = np.zeros(int(prefixes.number.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(longest, prefixes.number[first], whole.max(1))
    by_prefix = np.lexsort((-rests.max(1), prefixes.number[first], -longest[prefixes.number[first]]))
    by_rest = np.argsort(-rests.max(1), kind="stable")
    found = [_fill(order, units, rests, prefixes, max_tokens) for order in (by_prefix, by_rest)]
    parts, needed = min(found, key=lambda one: one[1])
    return parts if needed <= WORTHWHILE * work else None


def _fill(
    order: Indexes, units: Indexes, rests: Indexes, prefixes: Prefixes, max_tokens: int
) -> tuple[list[Indexes], int]:
    """Return micro-batches of neighbours in ``order``, and the positions of all of them."""
    parts: list[Indexes] = []
    work = start = 0
    rows = longest = prefix = 0
    seen: set[int] = set()
    there = units >= 0
    own = np.where(there, prefixes.lengths[units], 0).max(1).tolist()
    numbers = np.where(there, prefixes.number[units], prefixes.number[units[:, :1]]).tolist()
    sizes, rest = there.sum(1).tolist(), rests.max(1).tolist()
    for place, unit in enumerate(order.tolist()):
        one, other = numbers[unit]
        known = len(seen) + (one not in seen) + (other != one and other not in seen)
        wide, tall, height = max(longest, rest[unit]), max(prefix, own[unit]), rows + sizes[unit]
        if rows and height * wide + (known + KEPT * height) * tall > max_tokens:
            parts.append(order[start:place])
            work += rows * longest + len(seen) * prefix
            start, seen, height = place, set(), sizes[unit]
            wide, tall = rest[unit], own[unit]
        rows, longest, prefix = height, wide, tall
        seen.update((one, other))
    parts.append(order[start:])
    return parts, work + rows * longest + len(seen) * prefix
