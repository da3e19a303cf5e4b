"""Attributes that a task gives to its workflow: sampling parameters, the keys of the record, and values that the
workflow may replace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from pydantic import BaseModel, ConfigDict

from trinity_mq.config.buffer.taskset import RELEASED_KEYS, sampling_parameters

T = TypeVar("T")


@dataclass(init=False, repr=False, eq=False)
class RolloutArgs(dict[str, Any]):
    """Sampling parameters by name, a dict of the parameters that are set. Each parameter is also an attribute:
    ``rollout_args.temperature``.

    A field that is not an item of the dict has its value in ``defaults``, else 1 for ``n`` and the model's own value
    for the other parameters. Defaults are not items, so ``**rollout_args`` passes on only the parameters that were set;
    ``dataclasses.asdict(rollout_args)`` returns all fields. None as a value means the model's own value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    """Number of likeliest tokens to sample from. -1: all."""
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    min_tokens: int | None = None
    """Minimum tokens of an answer: it does not end before."""
    ignore_eos: bool | None = None
    """Continue after the tokens that end an answer, up to ``max_tokens``."""
    stop: str | list[str] | None = None

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        defaults: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Set the parameters in ``values`` and ``fields``, except ``fields`` that equal the default of the class.
        ``defaults``: values of the attributes that are not set.
        """
        super().__init__(sampling_parameters(values))
        if fields:
            chosen = {name: value for name, value in fields.items() if value != _FIELD_DEFAULTS.get(name)}
            self.update(sampling_parameters(chosen))
        self.__dict__["defaults"] = {"n": 1, **(defaults or {})}

    def __getattr__(self, name: str) -> Any:
        parameters = {**_FIELD_DEFAULTS, **self.__dict__.get("defaults", {}), **self}
        if name not in parameters:
            raise AttributeError(f"rollout_args has no {name!r}, only {', '.join(parameters)}")
        return parameters[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None:
            self.pop(name, None)
        else:
            self[name] = value


_FIELD_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RolloutArgs)}
for _name in _FIELD_DEFAULTS:
    delattr(RolloutArgs, _name)  # the attribute is an item of the dict, so no class attribute may hide it


@dataclass
class FormatArgs:
    """Names of the record's keys (of the prompt, the answer, ...), and texts around the prompt."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prompt_type: str | None = None
    prompt_key: str = "question"
    response_key: str = "answer"
    system_prompt: str | None = None
    """System prompt of this task, also if it comes from the record."""
    system_prompt_key: str | None = None
    """Key of the record's own system prompt, which replaces ``system_prompt``."""
    messages_key: str = "messages"
    tools_key: str = "tools"
    image_key: str | None = None
    video_key: str | None = None
    reply_prefix: str | None = None
    """Text with which each answer begins. It is a part of the prompt."""
    workflow_key: str = ""
    reward_fn_key: str = ""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    enable_concatenated_multi_turn: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the wire form: the keys that released peers know, and other fields that differ from their defaults."""
        return {
            name: value
            for name in _FORMAT_DEFAULTS
            if (value := getattr(self, name)) != _FORMAT_DEFAULTS[name] or name in RELEASED_KEYS
        }


_FORMAT_DEFAULTS = {field.name: field.default for field in dataclasses.fields(FormatArgs)}


def rollout_args_of(value: Any) -> RolloutArgs:
    """Return the sampling parameters in ``value``, a mapping or an instance of any dataclass; none for None."""
    if isinstance(value, RolloutArgs):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return RolloutArgs(**dataclasses.asdict(value))
    return RolloutArgs(value or ())


def format_args_of(value: Any) -> FormatArgs:
    """Return the :class:`FormatArgs` in ``value``: a mapping, a section of the configuration, or an instance of any
    dataclass with such fields. Unknown keys of a mapping or dataclass are ignored. None gives the defaults.
    """
    if isinstance(value, FormatArgs):
        return value
    if isinstance(value, BaseModel):
        return FormatArgs(**value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return FormatArgs(**{name: field for name, field in dict(value or {}).items() if name in _FORMAT_DEFAULTS})


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
