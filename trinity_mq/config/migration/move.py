"""Moves settings one by one from one mapping to another, so that what nobody took is known at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from trinity_mq.config.loading.load import ConfigError, sections_of
from trinity_mq.config.run import Config

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A setting that the new configuration does not have."""

    key: str
    """Its dotted key in the old one."""
    value: Any
    reason: str
    matters: bool
    """Whether the run does something else without it."""


@dataclass
class Comments:
    """The comments on settings of the new configuration, and the settings that it lacks."""

    at: dict[Path, list[str]] = field(default_factory=dict)
    """Comments by place."""
    left_out: list[LeftOut] = field(default_factory=list)


class Move:
    """The settings of one mapping on their way into another.

    Keys are dotted. A value of None in the old configuration is as if it were not there.

    Args:
        source: The old settings, which stay as they are.
        comments: Takes what is to be said.
        place: Where the new settings will stand in the whole configuration.
        prefix: Where the old ones stood, for messages.
    """

    def __init__(self, source: Mapping[str, Any], comments: Comments, place: Path = (), prefix: str = "") -> None:
        self._source: dict[str, Any] = deepcopy(dict(source))
        self._comments = comments
        self._place = place
        self._prefix = prefix
        self.settings: dict[str, Any] = {}

    def peek(self, key: str, default: Any = None) -> Any:
        """Return the value of an old key, which stays to be taken."""
        here: Any = self._source
        for part in key.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return default if here is None else here

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of an old key and take it out; ``default`` where it has none."""
        *parents, last = key.split(".")
        here: Any = self._source
        for part in parents:
            here = here.get(part)
            if not isinstance(here, Mapping):
                return default
        found = here.pop(last, None) if isinstance(here, dict) else None
        return default if found is None else found

    def take_mapping(self, key: str) -> Mapping[str, Any]:
        """Return settings by name and take them out.

        Raises:
            ConfigError: They are something else.
        """
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._prefix}{key}: wanted settings by name, got {value!r}")
        return value

    def take_mappings(self, key: str) -> list[Mapping[str, Any]]:
        """Return a list of settings by name and take it out.

        Raises:
            ConfigError: It is something else.
        """
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{self._prefix}{key}: wanted a list, got {value!r}")
        for number, one in enumerate(value):
            if not isinstance(one, Mapping):
                raise ConfigError(f"{self._prefix}{key}.{number}: wanted settings by name, got {one!r}")
        return value

    def names(self) -> list[str]:
        """Return the keys that nobody took, without those inside."""
        return [str(key) for key in self._source]

    def put(self, key: str, value: Any, *comments: str) -> None:
        """Set a new key, with comments about it."""
        *parents, last = key.split(".")
        here = self.settings
        for part in parents:
            here = here.setdefault(part, {})
        here[last] = value
        if comments:
            self.comment(key, *comments)

    def comment(self, key: str, *comments: str) -> None:
        """Add comments about a new key."""
        self._comments.at.setdefault((*self._place, *key.split(".")), []).extend(comments)

    def move(self, old: str, new: str, why: str = "") -> None:
        """Bring an old key, where it has a value, to its new place."""
        value = self.take(old)
        if value is not None:
            self.put(new, value, f"was {self._prefix}{old}" + (f": {why}" if why else ""))

    def keep(self, key: str) -> None:
        """Bring a key, where it has a value, to the same place."""
        value = self.take(key)
        if value is not None:
            self.put(key, value)

    def leave_out(self, old: str, reason: str, *, matters: bool = True) -> None:
        """Take an old key, where it has a value, and say why it is not there any more."""
        value = self.take(old)
        if value is not None:
            self.lost(LeftOut(f"{self._prefix}{old}", value, reason, matters))

    def lost(self, what: LeftOut) -> None:
        """Add a setting to those that are not there any more."""
        self._comments.left_out.append(what)

    def give_up(self, reason: str) -> None:
        """Leave out all that nobody took."""
        for key, _ in list(self.rest()):
            self.leave_out(key, reason)

    def item(self, source: Mapping[str, Any], new: Path, old: str) -> Move:
        """Return a move of a mapping inside, such as an item of a list."""
        return Move(source, self._comments, (*self._place, *new), f"{self._prefix}{old}.")

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Yield what nobody took, by dotted keys."""
        yield from _leaves(self._source, "")


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def is_ours(key: str, section: type[BaseModel] = Config) -> bool:
    """Return whether ``section`` has a setting of this dotted key."""
    first, _, rest = key.partition(".")
    field_ = section.model_fields.get(first)
    if field_ is None:
        return False
    inner = sections_of(field_.annotation)
    return not rest or not inner or any(is_ours(rest, one) for one in inner)
