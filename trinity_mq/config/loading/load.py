"""Loads a Config from a YAML file and ``key=value`` overrides. Errors name the nearest known key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from trinity_mq.config.loading.removed_keys import is_refusing, warn_of_removed_key, without_removed_keys
from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import trinity_key_advice
from trinity_mq.errors import suggest
from trinity_mq.telemetry.log import mask_passwords

_NOT_SET = re.compile(r"Environment variable '(.*)' not found")
_INTERPOLATION = re.compile(r"(?<!\\)(\\*)\$\{")


STAGES = "stages"
"""Key of a file that describes several runs, one after another."""
MERGE = "tag:yaml.org,2002:merge"
"""Tag of ``<<``, which may occur several times in a mapping, since each occurrence has an effect."""


class ConfigError(ValueError):
    """An invalid configuration. The message has one line for each error, with its place and reason."""


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the YAML file (or mapping) ``path`` with ``section.key=value`` overrides applied.

    Values may contain OmegaConf's interpolations: ``${oc.env:NAME}`` is the environment variable NAME,
    ``${oc.env:NAME,default}`` has a default, ``${model.max_model_len}`` is another value. ``${env:NAME:default}`` is
    accepted as well. A number in an override is a list position: ``buffer.eval_tasksets.0.limit=8``.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value is not allowed, or a variable is not set.
    """
    data, where = read_settings(path, overrides), config_title(path)
    if STAGES in data:
        raise ConfigError(
            f"{where}: holds {STAGES}, each a separate run: give the folder or the name of one stage, as `trinity-mq "
            "list` shows it (`trinity-mq run` and `trinity-mq validate` take the whole file)"
        )
    return validate_settings(data, where)


def config_title(path: str | Path | Mapping[str, Any]) -> str:
    """Return the name of a configuration for error messages."""
    return "configuration" if isinstance(path, Mapping) else str(path)


def read_settings(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of :func:`load_config` before validation, with all interpolations resolved.

    Raises:
        ConfigError: The file cannot be read, an override names a missing list item, or a variable is not set.
    """
    if not OmegaConf.has_resolver("env"):
        OmegaConf.register_resolver("env", _environment)
    try:
        data = OmegaConf.create(
            dict(path) if isinstance(path, Mapping) else read_file(Path(path)), flags={"allow_objects": True}
        )
        for word in overrides:
            _override(data, word)
        settings: dict[str, Any] = OmegaConf.to_container(data, resolve=True)  # type: ignore[assignment]  # of a mapping
    except OmegaConfBaseException as error:
        raise ConfigError(f"{config_title(path)}: {_explain_interpolation(error)}") from None
    return settings


def validate_settings(settings: Mapping[str, Any], where: str) -> Config:
    """Return the validated configuration. A removed key warns, see :mod:`trinity_mq.config.loading.removed_keys`.

    Raises:
        ConfigError: A key is unknown or a value is not allowed; each line of the message begins with ``where``.
    """
    settings, removed = without_removed_keys(settings)
    if removed and is_refusing():
        raise ConfigError("\n".join(f"{where}: {line}" for line in removed))
    for line in removed:
        warn_of_removed_key(line, where)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(Config, finding) for finding in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def escape_interpolations(value: Any) -> Any:
    """Return ``value`` with its texts escaped, so that :func:`load_config` does not interpolate them."""
    if isinstance(value, dict):
        return {key: escape_interpolations(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escape_interpolations(inner) for inner in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _environment(*words: str) -> str:
    name, colon, default = ",".join(str(word) for word in words).partition(":")
    value = os.environ.get(name, default if colon else None)
    if value is None:
        raise KeyError(f"Environment variable {name!r} not found")
    return value


def _explain_interpolation(error: OmegaConfBaseException) -> str:
    key, first = getattr(error, "full_key", None) or "(top level)", str(error).splitlines()[0]
    if match := _NOT_SET.search(first):
        return f"{key}: environment variable {match[1]} is not set; set it or write ${{oc.env:{match[1]},default}}"
    return mask_passwords(
        f"{key}: {first}; wanted ${{oc.env:NAME,default}} or ${{section.key}}, or \\${{ for a plain ${{"
    )


class DuplicateKeyError(yaml.YAMLError):
    """A mapping contains a key twice; the message names the key and both lines."""


class _StrictSafeLoader(yaml.SafeLoader):
    """Accepts each key once in a mapping. PyYAML alone silently takes the last of several equal keys."""

    # keys are checked before merge keys are expanded, since an explicit key may override a merged key
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                line = key.start_mark.line + 1
                if first := lines.get((key.tag, key.value)):
                    where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                    raise DuplicateKeyError(f"key {key.value!r} is given twice, {where}: remove one of the two")
                lines[key.tag, key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document.

    Raises:
        DuplicateKeyError: A mapping, at any depth, contains a key twice.
        yaml.YAMLError: The text is not valid YAML.
    """
    return yaml.load(text, Loader=_StrictSafeLoader)


def read_file(path: Path) -> dict[str, Any]:
    """Return the raw settings of a YAML file.

    Raises:
        ConfigError: The file cannot be read, or does not contain settings.
    """
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = mask_passwords(" ".join(str(error).split()))  # the error quotes the line, which may contain a URL
        raise ConfigError(f"{path}: is not YAML: {detail}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, wanted sections such as model: and buffer:")
    return data


def _override(data: DictConfig, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        shown = mask_passwords(word)
        raise ConfigError(f"override {shown!r}: wanted section.key=value, for example buffer.total_steps=10")
    try:
        value = load_yaml(text) if text else None
        OmegaConf.update(data, key, value, merge=False, force_add=True)
    except DuplicateKeyError as error:
        raise ConfigError(mask_passwords(f"override {word!r}: {error}")) from None
    except yaml.YAMLError as error:
        wrong = mask_passwords(f"override {word!r}: value is not YAML: {' '.join(str(error).split())}")
        raise ConfigError(wrong) from error
    except (
        ConfigIndexError,
        TypeError,
        ValueError,
    ) as error:  # a missing item, or a word instead of a list position
        raise ConfigError(mask_passwords(f"override {word!r}: {_missing_item(data, key)}")) from error


def _missing_item(data: DictConfig, key: str) -> str:
    """Return the reason why ``key`` does not lead to an item of a list."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        items = OmegaConf.select(data, ".".join(parts[:count]))
        if isinstance(items, ListConfig):
            name = ".".join(parts[:count])
            return (
                f"{name} has {len(items)} items, and {parts[count]!r} is not one of their numbers; the first item is "
                f"{name}.0"
            )
    return "wanted section.key=value"


def _explain(model: type[BaseModel], finding: Any) -> str:
    location, names = _user_location(model, tuple(finding["loc"]))
    where = ".".join(map(str, location)) or "(top level)"
    if finding["type"] == "extra_forbidden":
        if (advice := trinity_key_advice(location)) is not None:
            return f"{where}: a key of Trinity-RFT: {advice}"
        return f"{where}: unknown key; {suggest(str(location[-1]), sorted(names), 'known here:', cutoff=0.5)}"
    message = str(finding["msg"]).removeprefix("Value error, ")
    if finding["type"] in {"missing", "value_error"}:
        return f"{where}: {message}"
    if location[-1:] == ["api_key_env"]:
        return f"{where}: wanted the name of an environment variable, such as JUDGE_API_KEY, not the key itself"
    return mask_passwords(f"{where}: {message}, got {finding['input']!r}")


def _user_location(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[int | str], list[str]]:
    """Return a location as the user wrote it, and the keys known at the level of its last part.

    For a section with several kinds, pydantic inserts the kind into the location.
    """
    here, written, names = [model], [], []
    for part in location:
        if len(here) > 1 and isinstance(part, str):  # the kind, which the user did not write
            here = [section for section in here if _kind(section) == part] or here[-1:]
            continue
        written.append(part)
        if isinstance(part, str):
            fields = {name: field for section in here for name, field in section.model_fields.items()}
            names = list(fields)
            here = sections_of(fields[part].annotation) if part in fields else []
    return written, names


def _kind(section: type[BaseModel]) -> Any:
    """Return the name of one of several kinds of a section."""
    kinds = [field.default for name, field in section.model_fields.items() if name in {"kind", "selector_type"}]
    return kinds[0] if kinds else None


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a type, including sections in unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [model for member in inner for model in sections_of(member)]
