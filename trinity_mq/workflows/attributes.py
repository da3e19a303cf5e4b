"""Attributes that a task gives to its workflow: sampling parameters, and values that the workflow may replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

T = TypeVar("T")


class RolloutArgs(dict[str, Any]):
    """Sampling parameters by name, also readable as attributes: ``rollout_args.temperature``.

    An attribute that is not an item of the dict has a default: 1 for ``n``, the model's own value for the other
    parameters. Defaults are not items, so ``**rollout_args`` passes on only the parameters that were set.
    """

    def __init__(
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), defaults: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(values)
        self.__dict__["defaults"] = {"n": 1, **(defaults or {})}

    def __getattr__(self, name: str) -> Any:
        parameters = {**self.__dict__.get("defaults", {}), **self}
        if name not in parameters:
            raise AttributeError(f"rollout_args has no {name!r}, only {', '.join(parameters)}")
        return parameters[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Replaceable(Generic[T]):
    """A computed property that an instance replaces by assigning to it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Replaceable[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> T | Replaceable[T]:
        return self if owner is None else self._compute(owner)

    if TYPE_CHECKING:

        def __set__(self, owner: object, value: T) -> None: ...
