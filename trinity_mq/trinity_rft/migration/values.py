"""Raw values of a configuration file, which may be interpolations of OmegaConf."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_mq.config.loading.load import ConfigError

_VARIABLE = re.compile(r"\$\{(?:oc\.)?env:([^},:]+)(?:[,:]([^}]*))?\}")
_OTHER = re.compile(r"\$\{(?!oc\.env:|env:)")


def without_references(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``source`` with references to its own settings replaced by their values, since keys move.

    Interpolations of environment variables are kept.

    Raises:
        ConfigError: A reference does not resolve.
    """
    whole = OmegaConf.create(dict(source), flags={"allow_objects": True})

    def replaced(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): replaced(inner, f"{place}.{key}".lstrip(".")) for key, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
        if not isinstance(value, str) or not _OTHER.search(value):
            return value
        try:
            resolved = OmegaConf.select(whole, place)
        except (OmegaConfBaseException, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(f"{place}: {value!r} has no value: {reason}; write the value itself") from None
        return OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved

    result: dict[str, Any] = replaced(dict(source), "")
    return result


def resolve_environment(value: Any) -> Any:
    """Return a value with its environment variables filled in; None if a variable has neither a value nor a default."""
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    missing = False

    def fill(match: re.Match[str]) -> str:
        nonlocal missing
        variable = os.environ.get(match[1], match[2])
        missing = missing or variable is None
        return variable or ""

    text = _VARIABLE.sub(fill, value)
    return None if missing else yaml.safe_load(text)


def number(value: Any) -> float | None:
    """Return a number, also from a text such as ``5e-7``; None if the value is not a number."""
    resolved = resolve_environment(value)
    if isinstance(resolved, bool) or not isinstance(resolved, int | float | str):
        return None
    try:
        return float(resolved)
    except ValueError:
        return None


def whole(value: Any) -> int | None:
    """Return a whole number; None if the value is not a whole number."""
    parsed = number(value)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None
