"""Recorded answers of a wrapped model until a workflow takes them, and the sequence of its seeds."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable

from trinity_mq.experience import Experience

Partial = Callable[[], list[Experience]]
"""Returns the experiences of an answer that is still arriving, up to its current end."""
SEED_BITS = 63


class ExperienceHistory:
    """Experiences in the order in which their answers completed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._experiences: list[Experience] = []
        self._partials: list[Partial] = []

    def add(self, experiences: Iterable[Experience]) -> None:
        """Append ``experiences``."""
        with self._lock:
            self._experiences.extend(experiences)

    def expect(self, partial: Partial) -> None:
        """Register a partial answer, which :meth:`settle` or :meth:`take` evaluates."""
        with self._lock:
            self._partials.append(partial)

    def settle(self, partial: Partial, *, keep: bool = True) -> None:
        """Append the answer's experiences, once; with ``keep`` False discard them. Does nothing if :meth:`take` cleared
        it before.
        """
        with self._lock:
            if partial in self._partials:
                self._partials.remove(partial)
                if keep:
                    self._experiences += partial()

    def take(self, *, clear: bool) -> list[Experience]:
        """Return the recorded experiences, and clear them with ``clear``. Answers still arriving are included up to
        their current end.
        """
        with self._lock:
            taken = [*self._experiences, *(experience for partial in self._partials for experience in partial())]
            if clear:
                self._experiences.clear()
                self._partials.clear()
        return taken


class Seeds:
    """A sequence of seeds derived from one seed, and further sequences for clones. Without a seed all are None."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._calls, self._clones = itertools.count(), itertools.count()

    def next(self) -> int | None:
        """Return the seed of the next call."""
        return self._derived("call", next(self._calls))

    def clone(self) -> Seeds:
        """Return a new sequence for the next clone."""
        return Seeds(self._derived("clone", next(self._clones)))

    def _derived(self, purpose: str, number: int) -> int | None:
        if self._seed is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/{purpose}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
