"""Keeps the recorded answers of a wrapped model until a workflow takes them, and the sequence of its seeds."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable

from trinity_mq.experience import Experience

Partial = Callable[[], list[Experience]]
"""Returns the experiences of an answer that is still arriving, as far as it has come."""
SEED_BITS = 63


class History:
    """Experiences in the order in which their answers were complete. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._experiences: list[Experience] = []
        self._coming: list[Partial] = []

    def add(self, experiences: Iterable[Experience]) -> None:
        """Keep ``experiences``."""
        with self._lock:
            self._experiences.extend(experiences)

    def expect(self, partial: Partial) -> None:
        """Keep what ``partial`` says when :meth:`settle` comes, or when somebody takes before."""
        with self._lock:
            self._coming.append(partial)

    def settle(self, partial: Partial, *, keep: bool = True) -> None:
        """Keep what has come, once; without ``keep`` forget it. Does nothing if it was taken before."""
        with self._lock:
            if partial in self._coming:
                self._coming.remove(partial)
                if keep:
                    self._experiences += partial()

    def take(self, *, clear: bool) -> list[Experience]:
        """Return what is kept; ``clear`` forgets it. What is still coming is taken as far as it has come."""
        with self._lock:
            taken = [*self._experiences, *(experience for partial in self._coming for experience in partial())]
            if clear:
                self._experiences.clear()
                self._coming.clear()
        return taken


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
