"""Derives the seeds of single calls from the seed of a run, so that a run is reproducible as a whole."""

from __future__ import annotations

import hashlib
import itertools

SEED_BITS = 63


class Seeds:
    """A row of seeds derived from one, and further rows for clones. Without a seed there are none."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._calls, self._clones = itertools.count(), itertools.count()

    def next(self) -> int | None:
        """Return the seed of the next call."""
        return self._derived("call", next(self._calls))

    def clone(self) -> Seeds:
        """Return a row of its own for the next clone."""
        return Seeds(self._derived("clone", next(self._clones)))

    def _derived(self, purpose: str, number: int) -> int | None:
        if self._seed is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/{purpose}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
