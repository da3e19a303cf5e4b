"""Experience parts that hold the experiences of several attempts, listed in a header.

An experience part belongs to one attempt, named in the headers ``attempt``, ``part`` and ``parts``. A *shared* part
holds all experiences of several attempts at slices of one ticket, one attempt after the other; its header ``attempts``
lists them: ``<attempt>:<experiences>,<attempt>:<experiences>,...``. Each entry counts as part 0 of 1 of its attempt.
The manifest accepts or drops it like any other part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity_mq.bus import Incoming
from trinity_mq.messages import DecodeError, TaskSlice, Version

if TYPE_CHECKING:
    from trinity_mq.experience import Experience, ExperienceBatch

PartKey = tuple[str, int]
"""``(attempt, part)``."""

MAX_COUNT_DIGITS = 6
"""Maximum digits of an experience count in the ``attempts`` header."""


@dataclass(frozen=True)
class PartMember:
    """Contribution of one attempt to a shared part."""

    task_slice: TaskSlice
    attempt: str
    experiences: Sequence[Experience]
    size: int
    """Upper bound of the size of its encoded experiences in bytes."""
    oldest: Version | None
    """The oldest weight version in the contribution."""


@dataclass(frozen=True, slots=True)
class AttemptRows:
    """Rows of a part that hold the experiences of one attempt."""

    key: PartKey
    rows: slice | None = None
    """Rows of this attempt; None: all rows."""
    total: int = 0
    """Experiences of all attempts in the part, if ``rows`` is set."""

    def of(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Return the experiences of this attempt from the part's experiences ``batch``.

        Raises:
            DecodeError: The number of experiences in the part differs from its header.
        """
        if self.rows is None:
            return batch
        self.check(len(batch))
        return batch[self.rows]

    def check(self, experiences: int) -> None:
        """Raise DecodeError if the number of ``experiences`` differs from the part's header."""
        if self.rows is not None and self.total != experiences:
            raise DecodeError(f"header attempts lists {self.total} experiences, the body holds {experiences}")


def attempt_rows_of(incoming: Incoming) -> list[AttemptRows]:
    """Return the attempts whose experiences a part holds, with their rows.

    Raises:
        DecodeError: The headers are missing or malformed.
    """
    attempt, part, attempts = (incoming.headers.get(name) for name in ("attempt", "part", "attempts"))
    if isinstance(attempt, str) and isinstance(part, int):
        return [AttemptRows((attempt, part))]
    if not isinstance(attempts, str):
        raise DecodeError("an experience part needs the headers attempt and part, or attempts where several share it")
    counts: dict[str, int] = {}
    for entry in attempts.split(","):
        name, _, count = entry.rpartition(":")
        if not name or name in counts or not count.isascii() or not count.isdigit() or len(count) > MAX_COUNT_DIGITS:
            raise DecodeError(f"header attempts has {entry[:80]!r}, wanted <attempt>:<experiences>, each attempt once")
        counts[name] = int(count)
    ends = list(itertools.accumulate(counts.values()))
    return [
        AttemptRows((name, 0), slice(end - count, end), ends[-1])
        for (name, count), end in zip(counts.items(), ends, strict=True)
    ]
