"""Best and worst of k by bootstrap, for many tasks at once.

The resamples of n runs are those of ``numpy.random.RandomState(42).randint(0, n, size=(1000, k))``: one generator for
each (n, k), so that all keys and all tasks see the same ones and compare. The figures of the reference system come out
to the last digit.

Their mean is not taken over 1000 drawn rows: with the values of a task in order, what counts of each is in how many
resamples it is the first one held. Which resamples hold a run is a row of 1000 bits, and the counting is done on words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 42
_WORD_BITS = 64


def sizes(n: int) -> list[int]:
    """Return the k of ``best@k`` for n runs: the powers of two below n, and n; none for a single run.

    >>> sizes(9)
    [2, 4, 8, 9]
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def spread(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation (of the population) of each row; the rows are equally long."""
    import numpy as np  # a fifteenth of a second, which only evaluations need

    table = np.asarray(rows, dtype=np.float64)
    with np.errstate(all="ignore"):  # what a workflow reports may be infinite, and then so are these, or nan
        return table.mean(axis=1).tolist(), table.std(axis=1).tolist()


def extremes(rows: Sequence[Sequence[float]], k: int) -> tuple[list[float], list[float]]:
    """Return for each row the mean, over the resamples of k of its values, of the greatest and of the least; the rows
    are equally long.
    """
    import numpy as np

    table = np.asarray(rows, dtype=np.float64)
    order = np.argsort(table, axis=1, kind="stable")
    rising = np.take_along_axis(table, order, axis=1)
    lacking = _lacking(table.shape[1], k)
    return _mean_of_first(rising[:, ::-1], lacking[order[:, ::-1]]), _mean_of_first(rising, lacking[order])


def _mean_of_first(values: NDArray[np.float64], lacking: NDArray[np.uint64]) -> list[float]:
    """Return for each row the mean of the first value that each resample holds.

    Args:
        values: ``[rows, n]``.
        lacking: ``[rows, n, words]``: a bit for each resample that does not hold the run of that value.
    """
    import numpy as np

    left = np.bitwise_and.accumulate(lacking, axis=1)
    counts = np.bitwise_count(left).sum(axis=2, dtype=np.int64)
    first = -np.diff(counts, axis=1, prepend=RESAMPLES)
    with np.errstate(all="ignore"):
        means: list[float] = ((np.where(first > 0, values, 0.0) * first).sum(axis=1) / RESAMPLES).tolist()
    return means


@functools.lru_cache(maxsize=64)
def _lacking(n: int, k: int) -> NDArray[np.uint64]:
    """Return ``[n, words]``: a bit for each resample of k out of n runs that does not hold the run."""
    import numpy as np

    drawn = np.random.RandomState(SEED).randint(0, n, size=(RESAMPLES, k))
    lacking = np.zeros((n, -(-RESAMPLES // _WORD_BITS) * _WORD_BITS), dtype=bool)
    lacking[:, :RESAMPLES] = True
    lacking[drawn, np.arange(RESAMPLES)[:, None]] = False
    return np.packbits(lacking, axis=1).view(np.uint64)
