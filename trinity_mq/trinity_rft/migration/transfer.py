"""Moves settings from one mapping to another, by rows of the table of names, and records the settings left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel

from trinity_mq.config.loading.load import ConfigError
from trinity_mq.config.loading.problems import sections_of
from trinity_mq.config.loading.secrets import VARIABLE
from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import OldKey

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An old setting that the new configuration does not have, or that :attr:`Migration.notes` describes."""

    key: str
    """Dotted key in the old configuration."""
    value: Any
    reason: str
    matters: bool
    """Whether the run behaves differently without it."""
    is_purpose: bool = False
    """Whether the run loses its purpose without it, so that the new configuration must not be used as it is. The reason
    then names the missing capability.
    """


@dataclass
class Migration:
    """A new configuration, ready to be written, with comments, origins, notes and the settings left out."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the new configuration, by section."""
    comments: dict[Path, list[str]] = field(default_factory=dict)
    """Comments on changes, by the place of a setting."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Old settings that the new configuration does not have, with the reasons."""
    notes: list[LeftOut] = field(default_factory=list)
    """Old settings that were moved and that need something on this machine, which their reason names."""
    origins: dict[Path, str] = field(default_factory=dict)
    """Dotted keys of the old configuration, by the place of the new setting or section that was made from the key."""


class SettingsTransfer:
    """A transfer of the settings of one mapping to another.

    Keys are dotted. A value of None in the old configuration counts as missing.

    Args:
        source: The old settings, which are not modified.
        migration: Collects comments, origins and the settings that are left out.
        place: Place of the new settings in the whole configuration.
        prefix: Place of the old settings, for messages.
    """

    def __init__(self, source: Mapping[str, Any], migration: Migration, place: Path = (), prefix: str = "") -> None:
        self._source: dict[str, Any] = deepcopy(dict(source))
        self._migration = migration
        self._place = place
        self._prefix = prefix
        self.settings: dict[str, Any] = {}

    def peek(self, key: str, default: Any = None) -> Any:
        """Return the value of an old key without removing it."""
        value = value_at(self._source, key)
        return default if value is None else value

    def resolved(self, key: str, default: Any = None) -> Any:
        """Return the value of an old key with its environment variables filled in, without removing it."""
        value = resolve_environment(self.peek(key))
        return default if value is None else value

    def take(self, key: str, default: Any = None) -> Any:
        """Remove an old key and return its value; ``default`` if the value is missing."""
        section, _, last = ("", "", key) if key in self._source else key.rpartition(".")
        here = value_at(self._source, section) if section else self._source
        value = here.pop(last, None) if isinstance(here, dict) else None
        return default if value is None else value

    def take_first(self, *keys: str) -> Any:
        """Remove old keys and return the first value among them."""
        values = [self.take(key) for key in keys]
        return next((value for value in values if value is not None), None)

    def fill(self, key: str, value: Any) -> None:
        """Set an old key to the value of another old key with the same meaning."""
        *parents, last = key.split(".")
        here = self._source
        for part in parents:
            section = here.get(part)
            here[part] = here = section if isinstance(section, dict) else {}
        here[last] = value

    def take_mapping(self, key: str) -> Mapping[str, Any]:
        """Remove an old key and return its value, a mapping; empty if it has none.

        Raises:
            ConfigError: The value is not a mapping.
        """
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.old_key(key)}: wanted settings by name, got {value!r}")
        return value

    def take_mappings(self, key: str) -> list[Mapping[str, Any]]:
        """Remove an old key and return its value, a list of mappings; empty if it has none.

        Raises:
            ConfigError: The value is not a list of mappings.
        """
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{self.old_key(key)}: wanted a list, got {value!r}")
        for number, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise ConfigError(f"{self.old_key(key)}.{number}: wanted settings by name, got {item!r}")
        return value

    def names(self) -> list[str]:
        """Return the remaining top-level keys of the old settings."""
        return [str(key) for key in self._source]

    def put(self, key: str, value: Any, *comments: str, origin: str = "") -> None:
        """Set a new key, with comments about it.

        Args:
            key: The new key.
            value: Its value.
            comments: Lines above the setting.
            origin: The old key that the value comes from, for messages about the new key. Empty: a key of the same
                name, if there is one.
        """
        *parents, last = key.split(".")
        here = self.settings
        for part in parents:
            here = here.setdefault(part, {})
        here[last] = value
        place = (*self._place, *key.split("."))
        if comments:
            self._migration.comments.setdefault(place, []).extend(comments)
        if origin:
            self._migration.origins[place] = self.old_key(origin)

    def has(self, key: str) -> bool:
        """Return whether a new key is set."""
        return value_at(self.settings, key) is not None

    def current(self, key: str) -> Any:
        """Return the value of a new key. If it is not set yet, return the value of the same old key, or the setting's
        default.
        """
        value = value_at(self.settings, key)
        return self.peek(key, default_of(key)) if value is None else value

    def apply(self, row: OldKey) -> None:
        """Move or leave out an old key as its row says."""
        if row.old.endswith(".*"):
            for key in [key for key, _ in self.rest() if key.startswith(row.old.removesuffix("*"))]:
                self.leave_out(key, row.comment, matters=bool(row.matters))
            return
        is_neutral = row.neutral and yaml.safe_load(row.neutral) in (self.resolved(row.old), number(self.peek(row.old)))
        if row.new and not self.has(row.new):
            self.move(row.old, row.new)
        elif row.comment:
            self.leave_out(row.old, row.comment, matters=bool(row.matters and not is_neutral))
        elif is_neutral:
            self.take(row.old)

    def move(self, old: str, new: str) -> None:
        """Move an old key, if it has a value, to its new place."""
        value = self.take(old)
        if value is not None:
            self.put(new, value, *([f"was {self._prefix}{old}"] if new != old else []), origin=old)

    def keep(self, *keys: str) -> None:
        """Move keys that have a value to the same place."""
        for key in keys:
            self.move(key, key)

    def keep_or_default(self, key: str, default: Any, comment: str = "Trinity-RFT's default") -> None:
        """Move a key to the same place, or write the default of Trinity-RFT."""
        self.keep(key)
        if not self.has(key):
            self.put(key, default, comment)

    def leave_out(self, old: str, reason: str, *, matters: bool = True) -> None:
        """Remove an old key, if it has a value, and record the reason why it is left out."""
        value = self.take(old)
        if value is not None:
            self.lost(old, value, reason, matters=matters)

    def refuse(self, old: str, value: Any, capability: str) -> None:
        """Remove an old key, and record that the run loses its purpose without it.

        Args:
            old: The old key.
            value: Its value, for the message.
            capability: The capability that is missing here, for the message.
        """
        self.take(old)
        self.record(LeftOut(self.old_key(old), value, capability, matters=True, is_purpose=True))

    def lost(self, old: str, value: Any, reason: str, *, matters: bool = True) -> None:
        """Record an old key that is left out, without removing it."""
        self.record(LeftOut(self.old_key(old), value, reason, matters))

    def record(self, setting: LeftOut) -> None:
        """Record a setting that is left out, by its whole old key."""
        self._migration.left_out.append(setting)

    def note(self, key: str, value: Any, text: str) -> None:
        """Record a need of a setting on this machine, once for each value.

        Args:
            key: Whole old key.
            value: Its value.
            text: Description of the need.
        """
        entry = LeftOut(key, value, text, matters=False)
        if all((note.value, note.reason) != (value, text) for note in self._migration.notes):
            self._migration.notes.append(entry)

    def old_key(self, key: str) -> str:
        """Return a whole old key, from the top of the old configuration."""
        return f"{self._prefix}{key}"

    def give_up(self, reason: str = "no counterpart here") -> None:
        """Record all remaining settings as left out."""
        for key, value in self.rest():
            self.lost(key, value, reason)

    def item(self, source: Mapping[str, Any], new: Path, old: str) -> SettingsTransfer:
        """Return a transfer of a nested mapping, such as an item of a list."""
        place = (*self._place, *new)
        if new:
            self._migration.origins[place] = self.old_key(old)
        return SettingsTransfer(source, self._migration, place, f"{self._prefix}{old}.")

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Yield the remaining settings, by dotted keys."""
        yield from _leaves(self._source, "")


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and not any("." in inner for inner in value):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def value_at(settings: Any, key: str) -> Any:
    """Return the value at a dotted key, whose numbers are positions in lists; None without a value."""
    for part in key.split("."):
        if isinstance(settings, list) and part.isdecimal():
            settings = next(iter(settings[int(part) :]), None)
        else:
            settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def training_tasksets(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the training tasksets of a new configuration."""
    buffer = settings.get("buffer", {})
    return [*([buffer["taskset"]] if "taskset" in buffer else []), *buffer.get("tasksets", ())]


def default_of(key: str) -> Any:
    """Return the default of a setting of :class:`Config` by its dotted key."""
    section: type[BaseModel] = Config
    *parents, last = key.split(".")
    for part in parents:
        (section,) = sections_of(section.model_fields[part].annotation)
    return section.model_fields[last].default


def is_config_key(key: str, section: type[BaseModel] = Config) -> bool:
    """Return whether ``section`` has a setting with this dotted key, or whether the key is inside of a setting that is
    not a section, such as a map.
    """
    first, _, rest = key.partition(".")
    field_ = section.model_fields.get(first)
    if field_ is None:
        return False
    inner = sections_of(field_.annotation)
    return not rest or not inner or any(is_config_key(rest, model) for model in inner)


def resolve_environment(value: Any) -> Any:
    """Return a value with its environment variables filled in; None if a variable has neither a value nor a default."""
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value
    if any(os.environ.get(match[1], match[2]) is None for match in VARIABLE.finditer(value)):
        return None
    text = VARIABLE.sub(lambda match: os.environ.get(match[1], match[2]), value)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a text with marks of YAML in it
        return text


def number(value: Any) -> float | None:
    """Return a number, also from a text such as ``5e-7``; None if the value is not a number."""
    resolved = resolve_environment(value)
    if isinstance(resolved, bool) or not isinstance(resolved, int | float | str):
        return None
    try:
        return float(resolved)
    except (ValueError, OverflowError):
        return None


def whole(value: Any) -> int | None:
    """Return a whole number; None if the value is not a whole number."""
    parsed = number(value)
    return int(parsed) if parsed is not None and parsed.is_integer() else None
