"""Loads a Config from a YAML file and ``key=value`` overrides. Errors name the nearest known key.

A removed setting (:data:`REMOVED_KEYS`) that a file still sets warns in release 0.2 and is refused from 0.3 on. Its row
names the constant that replaced the setting and tells the user what to do instead. docs/renamed.md has the same list.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import trinity_key_advice
from trinity_mq.errors import suggest
from trinity_mq.release import VERSION
from trinity_mq.telemetry.log import mask_passwords

_NOT_SET = re.compile(r"Environment variable '(.*)' not found")
_INTERPOLATION = re.compile(r"(?<!\\)(\\*)\$\{")


STAGES = "stages"
"""Key of a file that describes several runs, one after another."""
MERGE = "tag:yaml.org,2002:merge"
"""Tag of ``<<``, which may occur several times in a mapping, since each occurrence has an effect."""

REFUSING_RELEASE = (0, 3)
"""First release that refuses removed keys."""
_SHOWN: dict[Any, Any] = {}
"""Registry of the module ``warnings`` for warnings that were shown."""


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
    """Return the validated configuration. A removed key warns, see :mod:`trinity_mq.config.loading.load`.

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


class RemovedSettingWarning(FutureWarning):
    """A configuration sets a key that was removed. Python shows this warning to users by default."""


class RemovedKey(NamedTuple):
    """The replacement of one removed setting."""

    value: Any
    """Value used now, which was the default of the setting. A file that sets this value loses nothing."""
    constant: str
    """Dotted path of the constant that holds ``value``. Empty: another setting has taken the place of this one."""
    advice: str
    """Next step for a user who needs another value."""


REMOVED_KEYS: Mapping[str, RemovedKey] = MappingProxyType(
    {
        "explorer.batch_tries": RemovedKey(
            3,
            "trinity_agents.explorer.training_batches.MANIFEST_TRIES",
            "remove it; to wait longer for an idle operator, raise explorer.operator_deadline",
        ),
        "explorer.cancel_grace": RemovedKey(
            2.0,
            "trinity_mq.dispatch.dispatcher.CANCEL_GRACE",
            "remove it; to give the last tasks of a batch more time, raise explorer.over_rollout.wait_after_min",
        ),
        "explorer.dynamic_timeout.warmup_min_steps": RemovedKey(
            1,
            "trinity_mq.dispatch.timeouts.WARMUP_BATCHES",
            "remove it; if the first batches are the slow ones, raise explorer.dynamic_timeout.ratio",
        ),
        "explorer.rollout_model.max_batch_delay": RemovedKey(
            0.005,
            "trinity_mq.engines.server.server.MAX_BATCH_DELAY",
            "remove it; to bound a static batch, set explorer.rollout_model.max_batch_sequences",
        ),
        "explorer.auxiliary_models.health_interval": RemovedKey(
            10.0,
            "trinity_mq.engines.external.HEALTH_INTERVAL",
            "remove it; a call that the server refuses triggers a health check at once",
        ),
        "runner.eval_concurrency": RemovedKey(
            None,
            "",
            "remove it; a runner takes as many evaluation slices as training slices, runner.concurrency",
        ),
        "runner.max_stuck": RemovedKey(
            16,
            "trinity_agents.runner.agent.MAX_STUCK",
            "remove it; workflows that never return belong into processes: runner.blocking=process",
        ),
        "runner.max_block": RemovedKey(
            30.0,
            "trinity_agents.runner.agent.MAX_BLOCK",
            "remove it; make the workflow synchronous, or move the part that blocks into a thread",
        ),
        "runner.max_isolated": RemovedKey(
            2,
            "trinity_agents.runner.slice_executor.MAX_ISOLATED",
            "remove it; to run every blocking workflow in a process of its own, set runner.blocking=process",
        ),
        "runner.circuit_breaker.tries": RemovedKey(
            16,
            "trinity_agents.runner.circuit.MAX_TRIES",
            "remove it; runner.circuit_breaker.tries_alone is the limit of a slice that fails alone",
        ),
        "runner.circuit_breaker.pause": RemovedKey(
            5.0,
            "trinity_agents.runner.circuit.PAUSE",
            "remove it; to pause later, raise runner.circuit_breaker.failures",
        ),
        "runner.circuit_breaker.max_pause": RemovedKey(
            300.0,
            "trinity_agents.runner.circuit.MAX_PAUSE",
            "remove it; to end a run earlier in an outage, lower explorer.stall_timeout",
        ),
        "synchronizer.member_lease": RemovedKey(
            15.0,
            "trinity_mq.sync.gate.member_driver.MEMBER_LEASE",
            "remove it; synchronizer.sync_timeout bounds each phase of a sync",
        ),
        "synchronizer.checkpoint_keep": RemovedKey(
            2,
            "trinity_mq.sync.channels.checkpoint.channel.KEPT_VERSIONS",
            "remove it; to keep the models of many steps, set trainer.keep_every",
        ),
        "broker.publish_timeout": RemovedKey(
            300.0,
            "trinity_mq.config.bus.PUBLISH_TIMEOUT",
            "remove it; to let agents hold messages for longer, raise broker.consumer_timeout",
        ),
        "buffer.trainer_input.replay.cache_bytes": RemovedKey(
            2**28,
            "trinity_agents.trainer.sources.replay.CACHE_BYTES",
            "remove it; to replay from fewer groups, lower buffer.trainer_input.replay.capacity",
        ),
        "algorithm.optimizer.decay_norms_and_biases": RemovedKey(
            False,
            "trinity_mq.training.optimizers.DECAY_NORMS_AND_BIASES",
            "remove it; algorithm.optimizer.weight_decay applies to matrices alone",
        ),
    }
)
"""Removed settings by dotted key, without list positions."""


def without_removed_keys(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``settings`` without removed keys, and one line for each removed key whose value is not used.

    A key with the value of its constant is dropped without a line: the folders of earlier runs set every key.
    """
    lines: list[str] = []
    kept = dict(settings)
    for key, row in REMOVED_KEYS.items():
        kept = _without(kept, key.split("."), (), row, lines)
    return kept, lines


def is_refusing(version: str = VERSION) -> bool:
    """Return whether a release refuses removed keys.

    >>> is_refusing("0.2.7"), is_refusing("0.3.0.dev0")
    (False, True)
    """
    return tuple(int(part) for part in version.split(".")[:2]) >= REFUSING_RELEASE


def warn_of_removed_key(line: str, where: str) -> None:
    """Show a line of :func:`without_removed_keys` once, as a warning whose place is the user's file ``where``."""
    warnings.warn_explicit(
        f"{line}. Release 0.3 refuses the key", RemovedSettingWarning, filename=where, lineno=0, registry=_SHOWN
    )


def _without(section: Any, parts: Sequence[str], place: tuple[str, ...], row: RemovedKey, lines: list[str]) -> Any:
    """Return a section, or a list of sections, without the key ``parts``. Nothing is changed in place."""
    if isinstance(section, list | tuple):
        return [_without(item, parts, (*place, str(number)), row, lines) for number, item in enumerate(section)]
    if not isinstance(section, Mapping) or parts[0] not in section:
        return section
    name, inner = parts[0], parts[1:]
    if inner:
        return {**section, name: _without(section[name], inner, (*place, name), row, lines)}
    if section[name] != row.value:
        used = f"{row.value!r} ({row.constant}) is used, not" if row.constant else "nothing uses"
        lines.append(f"{'.'.join((*place, name))}: this setting was removed; {used} {section[name]!r}: {row.advice}")
    return {key: value for key, value in section.items() if key != name}
