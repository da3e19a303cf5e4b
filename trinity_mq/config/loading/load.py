"""Loads a Config from a YAML file and ``key=value`` overrides. Errors name the nearest known key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException

from trinity_mq.config.loading.examples import EXAMPLE, example_settings, example_text
from trinity_mq.config.loading.problems import MERGE, TEXT, KeyLines, Location, Problem, collect_problems
from trinity_mq.config.loading.removed_keys import is_refusing, warn_of_removed_key, without_removed_keys
from trinity_mq.config.loading.secrets import MASK, Secrets, is_secret_name, may_contain_secrets
from trinity_mq.config.run import Config
from trinity_mq.telemetry.log import mask_passwords

_NOT_SET = re.compile(r"Environment variable '(.*)' not found")
_QUOTED = re.compile(r"\b(alias|anchor|tag) '[^']*'")
_INTERPOLATION = re.compile(r"(?<!\\)(\\*)\$\{")


MAX_VALUES, MAX_LEVELS = 100_000, 100
"""Limits of the content of a file. Values count once for each use of an alias."""
_TOO_LARGE = (
    f"too many levels, more than {MAX_LEVELS}, or more than {MAX_VALUES} values: each alias (*name) counts with all of "
    "its values, and without end inside of its anchor; write fewer aliases"
)
STAGES = "stages"
"""Key of the list of stages, in a file that describes several runs in succession."""


class ConfigError(ValueError):
    """An invalid configuration. The message has one line for each error, with its place and reason."""

    remaining: Config | None = None
    """The configuration without the keys that have errors, if it is valid."""
    problems: Sequence[Problem] = ()
    """The problems of keys and between keys that the message lists."""
    within: Location = ()
    """Location in the file of the settings with these problems, such as ``("stages", 1)``."""


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
    return validate_settings(data, where, SettingsSource(path, overrides))


class SettingsSource(NamedTuple):
    """Origin of settings, which is read again to find the lines of errors."""

    path: str | Path | Mapping[str, Any]
    overrides: Sequence[str] = ()
    within: Location = ()
    """Location of the settings in the file, such as ``("stages", 1)``."""

    def lines_of(self, problems: Sequence[Problem]) -> list[int | None]:
        """Return the line of each problem. None: no line of the file is its cause."""
        try:
            text = "" if isinstance(self.path, Mapping) else _text(self.path)
        except OSError:  # removed since it was read
            text = ""
        lines = KeyLines(text, [word.partition("=")[0] for word in self.overrides])
        return [lines.of(problem, self.within) for problem in problems]


def _text(path: str | Path) -> str:
    name = str(path)
    if name.startswith(EXAMPLE):
        return example_text(name.removeprefix(EXAMPLE))
    return Path(path).read_text(encoding="utf-8")


def config_title(path: str | Path | Mapping[str, Any]) -> str:
    """Return the name of a configuration for error messages."""
    return "configuration" if isinstance(path, Mapping) else str(path)


def read_settings(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of :func:`load_config` before validation, with all interpolations resolved.

    Raises:
        ConfigError: The file cannot be read, an override is not ``key=value`` with a YAML value or names a missing list
            item, or a variable is not set.
    """
    if not OmegaConf.has_resolver("env"):
        OmegaConf.register_resolver("env", _environment)
    try:
        data = OmegaConf.create(
            dict(path) if isinstance(path, Mapping) else read_file(path), flags={"allow_objects": True}
        )
        for word in overrides:
            _override(data, word)
        settings: dict[str, Any] = OmegaConf.to_container(data, resolve=True)  # type: ignore[assignment]  # of a mapping
    except OmegaConfBaseException as error:
        raise ConfigError(f"{config_title(path)}: {_explain_interpolation(error)}") from None
    except RecursionError:
        raise ConfigError(f"{config_title(path)}: too many levels, or an alias (*name) inside of its anchor") from None
    return settings


def validate_settings(settings: Mapping[str, Any], where: str, source: SettingsSource | None = None) -> Config:
    """Return the validated configuration. A removed key warns, see :mod:`trinity_mq.config.loading.removed_keys`.

    Args:
        settings: The settings.
        where: Name of the settings, which begins each line of an error.
        source: Origin of the settings. None: errors name no lines.

    Raises:
        ConfigError: Keys are unknown or values are not allowed. The message lists all problems.
    """
    settings, removed = without_removed_keys(settings)
    if not is_refusing():
        for line in removed:
            warn_of_removed_key(line, where)
        removed = []
    config, problems = collect_problems(settings)
    problems += [Problem((), line) for line in removed]
    if config is not None and not problems:
        return config
    secrets = Secrets(settings)
    problems = [problem._replace(text=secrets.hide(problem.text)) for problem in problems]
    source = source or SettingsSource({})
    numbered = sorted(
        zip(source.lines_of(problems), problems, strict=True), key=lambda pair: (pair[0] is None, pair[0])
    )
    path = str(source.path)
    titles = [where if line is None else where.replace(path, f"{path}:{line}", 1) for line, _ in numbered]
    lines = [f"{title}: {problem.text}" for title, (_, problem) in zip(titles, numbered, strict=True)]
    error = ConfigError("\n".join(lines))
    error.remaining, error.problems, error.within = config, problems, source.within
    raise error


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
    first = "this interpolation has no value" if is_secret_name(key) else first
    return mask_passwords(
        f"{key}: {first}; wanted ${{oc.env:NAME,default}} or ${{section.key}}, or \\${{ for a plain ${{"
    )


class DuplicateKeyError(yaml.YAMLError):
    """A mapping contains a key twice; the message names the key and both lines."""


class _StrictSafeLoader(yaml.SafeLoader):
    """Accepts each key once in a mapping, where PyYAML alone silently takes the last of several equal keys. A key is
    the text that the user wrote: ``yes`` and ``12`` are names too.
    """

    # keys are checked before merge keys are expanded, since an explicit key may override a merged key
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for number, (key, value) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                line = key.start_mark.line + 1
                if first := lines.get(key.value):
                    where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                    raise DuplicateKeyError(f"key {key.value!r} is given twice, {where}: remove one of the two")
                lines[key.value] = line
                node.value[number] = (yaml.ScalarNode(TEXT, key.value, key.start_mark, key.end_mark), value)
        return node


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document.

    Raises:
        DuplicateKeyError: A mapping, at any depth, contains a key twice.
        yaml.YAMLError: The text is not valid YAML.
    """
    return yaml.load(text, Loader=_StrictSafeLoader)


def _yaml_reason(error: Exception, key: str = "") -> str:
    """Return the reason why a text is not YAML. Lines that may contain secrets are not quoted.

    Args:
        error: Error of the reader.
        key: Key of the text.
    """
    for name in ("context_mark", "problem_mark"):
        mark: Any = getattr(error, name, None)
        line = "" if mark is None else mark.get_snippet(max_length=2 * len(mark.buffer or ""))
        if line and may_contain_secrets(f"{key}: {line}"):
            mark.buffer = None
            error.problem = _QUOTED.sub(rf"\1 '{MASK}'", str(error.problem))  # type: ignore[attr-defined]
    reason = " ".join(str(error).split())
    return Secrets(reason).hide(reason)


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the raw settings of a YAML file, or of a shipped example such as ``example:arithmetic``.

    Raises:
        ConfigError: The file cannot be read, or does not contain settings.
    """
    try:
        data = load_yaml(_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_LARGE}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes than UTF-8, or an impossible date
        raise ConfigError(f"{path}: is not YAML: {_yaml_reason(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, wanted sections such as model: and buffer:")
    if _is_too_large(data):
        raise ConfigError(f"{path}: {_TOO_LARGE}")
    return example_settings(data) if str(path).startswith(EXAMPLE) else data


def _is_too_large(data: Any) -> bool:
    """Return whether the content of a document exceeds MAX_VALUES or MAX_LEVELS. A small file with aliases may."""
    waiting, count = [(data, 1)], 0
    while waiting:
        value, level = waiting.pop()
        count += 1
        if count > MAX_VALUES or level > MAX_LEVELS:
            return True
        if isinstance(value, dict | list | tuple | set):
            waiting.extend((inner, level + 1) for inner in (value.values() if isinstance(value, dict) else value))
    return False


def _override(data: DictConfig, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        shown = mask_passwords(word)
        raise ConfigError(f"override {shown!r}: wanted section.key=value, for example buffer.total_steps=10")
    try:
        value = load_yaml(text) if text else None
        OmegaConf.update(data, key, value, merge=False, force_add=True)
    except (yaml.YAMLError, ConfigIndexError, TypeError, ValueError) as error:
        if isinstance(error, DuplicateKeyError):
            reason = str(error)
        elif isinstance(error, yaml.YAMLError):
            reason = f"value is not YAML: {_yaml_reason(error, key)}"
        else:  # a missing item, or a word instead of a list position
            reason = _missing_item(data, key)
        raise ConfigError(Secrets({key: text}).hide(f"override {word!r}: {reason}")) from error


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
