"""What a restricted pickle may be made of besides plain values, and what it may cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short

MAX_FIELDS = 64
"""Fields of a record: some twice as many as any has."""


class OverBudgetError(DecodeError):
    """The body as a whole costs too much to read."""


class Budget:
    """What reading a body may allocate beyond its own bytes; shared by everything that unfolds it."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def charge(self, size: int) -> None:
        """Take ``size`` bytes.

        Raises:
            OverBudgetError: They are not there.
        """
        self._left -= size
        if self._left < 0:
            raise OverBudgetError(f"the body unfolds to more than {self._limit} bytes, far more than it has")


class Function:
    """A function of ours that the name of another stands for; it gets the budget, then what the pickle passes."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Buildable(ABC):
    """What the pickle may hand a state to."""

    @abstractmethod
    def build(self, state: Any) -> None:
        """Take over ``state``; a ValueError or TypeError says that it does not fit."""


class RecordType:
    """Stands for a class whose instances are nothing but fields."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record(Buildable):
    """An instance of a :class:`RecordType`."""

    def __init__(self, kind: RecordType) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}

    def build(self, state: Any) -> None:
        """Collect fields by name."""
        if type(state) is not dict or len(state) > MAX_FIELDS or not all(type(name) is str for name in state):
            raise ValueError(
                f"the state of {self.kind.name} is {short(state)}, wanted at most {MAX_FIELDS} fields by name"
            )
        self.fields = state
