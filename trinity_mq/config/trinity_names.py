"""The names of Trinity-RFT's settings: one table from an old key to our key, ``trinity_names.csv``, for
``trinity-mq migrate``, for the keys that the loader accepts and for the errors about unknown keys.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

T = TypeVar("T")

ACCEPTED = "accepted"
"""Rule of the keys that the loader accepts."""
TASKSET = "taskset."
"""Beginning of the keys of a taskset, in ``buffer.explorer_input`` or in ``buffer``."""


@dataclass(frozen=True, slots=True)
class OldKey:
    """A setting of Trinity-RFT, a row of the table."""

    old: str
    """Dotted key; ``section.*`` stands for every key of a section."""
    new: str
    """Our key. Empty: no single setting here corresponds to it."""
    rule: str
    """Name of the function that ``migrate`` calls for the key and the keys that depend on it; ``accepted``: the loader
    translates the key. Empty: the row alone says where the value belongs.
    """
    matters: str
    """``yes`` if a run behaves differently without a key that is left out."""
    neutral: str
    """Value with which the key has no effect, as YAML. Without a ``comment`` the key is then dropped."""
    comment: str
    """Reason why the key is left out: always if ``new`` is empty, otherwise if another key has set ``new``."""
    hint: str
    """Advice in the error about the key. Empty: it follows from ``new`` and ``comment``."""

    @property
    def advice(self) -> str:
        """The advice in the error about the key, empty if the loader accepts the key."""
        if self.hint or self.rule == ACCEPTED or self.new == self.old:
            return self.hint
        if self.new:
            return f"it is `{self.new}`"
        return f"{self.comment}; leave it out" if self.comment else ""


def table_rows(package: str, name: str, kind: type[T]) -> tuple[T, ...]:
    """Return the rows of a CSV file in a package as objects of ``kind``, whose arguments are the columns."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return tuple(kind(**row) for row in csv.DictReader(text.splitlines()))


@cache
def trinity_names() -> Sequence[OldKey]:
    """Return the rows of the table; ``migrate`` applies them in this order."""
    return table_rows("trinity_mq.config", "trinity_names.csv", OldKey)


@cache
def key_advice() -> dict[str, str]:
    """Return the advice for settings of Trinity-RFT that are unknown here, by dotted key without list positions."""
    return {row.old.removesuffix(".*"): row.advice for row in trinity_names() if row.advice}


def trinity_key_advice(location: Sequence[int | str]) -> str | None:
    """Return the advice for a key of Trinity-RFT, None for any other key.

    Args:
        location: The key as the user wrote it, with list positions.
    """
    parts = [part for part in location if isinstance(part, str)]
    advice = key_advice().get(".".join(parts))
    if advice is None and len(parts) > 1 and "taskset" in parts[-2]:
        advice = key_advice().get(TASKSET + parts[-1])
    if advice is None and parts[-2:-1] == ["format"]:
        advice = key_advice().get(f"{TASKSET}format.{parts[-1]}")
    return advice
