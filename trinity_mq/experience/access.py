"""Reads and chooses among experiences, whether they are a list of objects or a batch of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from trinity_mq.experience.batch import ExperienceBatch
from trinity_mq.experience.record import Experience

Experiences = list[Experience] | ExperienceBatch
"""Argument of pure functions over experiences, which return the same form."""
E = TypeVar("E", list[Experience], ExperienceBatch)


def values(experiences: Sequence[Experience], name: str) -> list[Any]:
    """Return a field that is no tensor, a value for each experience; ``eid.step`` and the like are parts of ids."""
    if isinstance(experiences, ExperienceBatch):
        return experiences.values(name)
    if name.startswith("eid."):
        return [getattr(experience.eid, name[4:]) for experience in experiences]
    return [getattr(experience, name) for experience in experiences]


def ids(experiences: Sequence[Experience], kind: str) -> list[str]:
    """Return the ``uid``, ``sid``, ``rid`` or ``tid`` of each experience."""
    if isinstance(experiences, ExperienceBatch):
        return experiences.ids(kind)
    return [getattr(experience.eid, kind) for experience in experiences]


def chosen(experiences: E, numbers: Sequence[int]) -> E:
    """Return the experiences of these numbers, in that order."""
    if isinstance(experiences, ExperienceBatch):
        return experiences.select(numbers)
    return [experiences[number] for number in numbers]
