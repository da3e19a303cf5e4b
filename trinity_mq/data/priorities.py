"""Priorities of replayed groups in Trinity-RFT's class form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from trinity_mq.runtime.errors import FatalError, custom_code
from trinity_mq.runtime.plugins import Registry, resolve

PRIORITY_FUNC = Registry({}, "PRIORITY_FUNC")
"""Priorities, by the value of ``buffer.trainer_input.replay.priority_fn``; see :class:`PriorityFunction`."""


class PriorityFunction(ABC):
    """Computes the priority of a group of experiences. The priority must depend on the argument only, so that a trainer
    that resumes chooses the same groups.
    """

    @abstractmethod
    def __call__(self, item: list[Any]) -> tuple[float, bool]:
        """Return the priority of a group, and whether it may be replayed.

        Args:
            item: A list with a single object for the group. Its ``info`` has ``model_version``, the train step at which
                the group was fresh, and ``use_count``, the number of train steps that trained on it, the first one
                included.
        """

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return the default arguments of the constructor; ``priority_fn_args`` override them."""
        return {}


class PriorityError(FatalError, ValueError):
    """The object of a priority class cannot be created, raised an error, or did not return a priority."""


class Priorities:
    """The priorities that an object in class form computes.

    Args:
        path: Dotted path of the class.
        args: Arguments of its constructor; they override its ``default_config``.

    Raises:
        UnknownNameError: The class does not exist.
        PriorityError: The object cannot be created.
    """

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self._path, kind = path, resolve("priority_fn", path)
        with custom_code(
            PriorityError, f"replay.priority_fn {path} cannot be made with priority_fn_args {dict(args)!r}:"
        ):
            self._made = kind(**{**kind.default_config(), **args})

    def of(self, born: int, uses: int) -> float:
        """Return the priority of a group, minus infinity if it must not be replayed.

        Args:
            born: Train step at which the group was fresh.
            uses: Number of train steps that replayed it.

        Raises:
            PriorityError: The object raised an error, or did not return a priority.
        """
        item = SimpleNamespace(info={"model_version": born, "use_count": uses + 1})
        with custom_code(PriorityError, f"replay.priority_fn {self._path} raised"):
            priority, is_kept = self._made(item=[item])
            number = float(priority)
        if math.isnan(number):
            raise PriorityError(f"replay.priority_fn {self._path} returns {priority!r}, wanted a number and a boolean")
        return number if is_kept else -math.inf
