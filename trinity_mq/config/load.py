"""Loads a Config from a YAML file and ``key=value`` overrides; errors name the nearest known key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trinity_mq.config.run import Config
from trinity_mq.telemetry.log import mask_passwords

_ENV = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?::([^}]*))?\}")


class ConfigError(ValueError):
    """An invalid configuration; the message names the place and the reason of each error, one a line."""


def load_config(
    path: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """Return the configuration in the YAML file (or mapping) ``path`` with ``section.key=value`` overrides applied.

    ``${env:NAME}`` in a value is the environment variable NAME, ``${env:NAME:default}`` has a default.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value is not allowed, or a variable is not set.
    """
    data = dict(path) if isinstance(path, Mapping) else _read(Path(path))
    for word in overrides:
        _override(data, word)
    data = _fill(data, environ, "")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        where = "configuration" if isinstance(path, Mapping) else str(path)
        lines = [_explain(Config, finding) for finding in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = mask_passwords(" ".join(str(error).split()))  # it quotes the line, which may hold a URL
        raise ConfigError(f"{path}: is not YAML: {detail}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, wanted sections such as model: and buffer:")
    return data


def _override(data: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        shown = mask_passwords(word)
        raise ConfigError(f"override {shown!r}: wanted section.key=value, for example buffer.total_steps=10")
    *parents, last = key.split(".")
    here = data
    for parent in parents:
        inner = here.get(parent)
        inner = dict(inner) if isinstance(inner, dict) else {}
        here[parent] = inner
        here = inner
    try:
        here[last] = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        wrong = mask_passwords(f"override {word!r}: value is not YAML: {' '.join(str(error).split())}")
        raise ConfigError(wrong) from error


def _fill(value: Any, environ: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill(inner, environ, f"{where}.{key}".lstrip(".")) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, environ, f"{where}.{i}") for i, inner in enumerate(value)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        found = environ.get(name, default)
        if found is None:
            raise ConfigError(
                f"{where}: environment variable {name} is not set; set it or write ${{env:{name}:default}}"
            )
        return found

    return _ENV.sub(variable, value)


def _explain(model: type[BaseModel], finding: Any) -> str:
    location = tuple(finding["loc"])
    where = ".".join(str(part) for part in location) or "(top level)"
    if finding["type"] == "extra_forbidden":
        names = _keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names))}"
        return f"{where}: unknown key; {hint}"
    message = str(finding["msg"]).removeprefix("Value error, ")
    if finding["type"] in {"missing", "value_error"}:
        return f"{where}: {message}"
    if location[-1:] == ("api_key_env",):
        return f"{where}: wanted the name of an environment variable, such as JUDGE_API_KEY, not the key itself"
    return mask_passwords(f"{where}: {message}, got {finding['input']!r}")


def _keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    here: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        here = _section(here.model_fields[part].annotation)
    return list(here.model_fields)


def _section(annotation: Any) -> Any:
    if get_origin(annotation) is None:
        return annotation
    for inner in get_args(annotation):
        found = _section(inner)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return annotation
