"""Translates a configuration of Trinity-RFT, lists its changes and the settings that it left out, and writes YAML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_mq.config.loading.load import STAGES, ConfigError, escape_interpolations
from trinity_mq.config.loading.stages import STAGE_NAME
from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import ACCEPTED, trinity_key_advice, trinity_names
from trinity_mq.trinity_rft.migration import algorithm, data, limits, rules, verl
from trinity_mq.trinity_rft.migration.transfer import (
    Migration,
    Path,
    SettingsTransfer,
    is_config_key,
    resolve_environment,
    value_at,
)

RULES = {
    rule.__name__: rule
    for rule in (
        rules.auxiliary_models, rules.checkpoints, rules.data_type, rules.engine_options, rules.explorer,
        rules.external_evaluation, rules.gateway, rules.lora, rules.mode, rules.model, rules.monitor, rules.names,
        rules.synchronizer, rules.template, rules.thinking, rules.truncation,
        data.batch_sizes, data.operators, data.packs, data.tasksets, data.trainer_input,
        algorithm.losses, algorithm.optimizer,
        limits.lookahead, limits.retention, limits.timeouts, limits.truncated_sampling,
        verl.verl,
    )
}  # fmt: skip
"""Rules of the table of names."""
WIDTH = 116
"""Maximum number of characters in a comment line."""
_REFERENCE = re.compile(r"\$\{(?!oc\.env:|env:)")


def migrate(source: Mapping[str, Any]) -> Migration:
    """Return a configuration that does the same here as ``source`` does with Trinity-RFT.

    Interpolations of environment variables are kept. Defaults of Trinity-RFT that differ from the defaults here are
    written explicitly.

    Raises:
        ConfigError: ``source`` is not a configuration of Trinity-RFT, or contains a dangling reference.
    """
    if "actor_rollout_ref" in source:
        raise ConfigError(
            "is veRL's own configuration: give the file of Trinity-RFT whose trainer.trainer_config_path names it"
        )
    if not any(isinstance(source.get(section), Mapping) for section in ("model", "buffer", "algorithm")):
        raise ConfigError(
            f"is not a configuration of Trinity-RFT: it has {', '.join(map(str, source)) or 'nothing'}, wanted "
            "sections such as algorithm, model and buffer"
        )
    resolved = _without_references(source)
    stages = resolved.pop(STAGES, None)
    return _stages(resolved, stages) if stages else _run(resolved)


def _run(source: Mapping[str, Any]) -> Migration:
    """Return the configuration of one run."""
    migration = Migration()
    move = SettingsTransfer(source, migration)
    applied = set[str]()
    for row in trinity_names():
        if row.rule == ACCEPTED:
            move.keep(row.old)
        elif not row.rule:
            move.apply(row)
        elif row.rule not in applied:
            applied.add(row.rule)
            RULES[row.rule](move)
    for key, value in list(move.rest()):
        if is_config_key(key):
            move.keep(key)
        else:
            reason = trinity_key_advice(key.split(".")) or "no counterpart here"
            move.lost(key, value, reason)
    migration.settings = {
        key: _ordered(move.settings[key]) for key in Config.model_fields if move.settings.get(key) not in (None, {})
    }
    return migration


def _ordered(section: Any) -> Any:
    """Return a section with its plain values before its subsections."""
    if isinstance(section, list):
        return [_ordered(item) for item in section]
    if not isinstance(section, Mapping):
        return section
    plain_first = sorted(section.items(), key=lambda item: isinstance(item[1], Mapping) or _are_sections(item[1]))
    return {key: _ordered(value) for key, value in plain_first}


def _are_sections(value: Any) -> bool:
    """Return whether a value is a list of sections that are not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and item for item in value)


def _stages(base: Mapping[str, Any], stages: Any) -> Migration:
    """Return the configuration of several runs, one after another.

    A stage of Trinity-RFT replaces whole sections; here a stage is merged into them. So each stage is migrated as a
    complete run, and the sections that all runs have in common are written once.
    """
    if not isinstance(stages, list) or not all(
        isinstance(stage, Mapping) and stage.get(STAGE_NAME) for stage in stages
    ):
        raise ConfigError(f"{STAGES}: wanted a list of settings with a {STAGE_NAME} each, got {stages!r}")
    runs = [
        _run({**base, **{key: value for key, value in stage.items() if key != STAGE_NAME and value is not None}})
        for stage in stages
    ]
    first = runs[0].settings
    shared = {key: value for key, value in first.items() if all(run.settings.get(key) == value for run in runs)}
    result = Migration({**shared, STAGES: []})
    result.comments = {place: texts for place, texts in runs[0].comments.items() if place[0] in shared}
    for number, (stage, run) in enumerate(zip(stages, runs, strict=True)):

        def old_key(key: str, number: int = number, stage: Mapping[str, Any] = stage) -> str:
            return f"{STAGES}.{number}.{key}" if key.split(".", maxsplit=1)[0] in stage else key

        section = {key: value for key, value in run.settings.items() if key not in shared}
        result.settings[STAGES].append({STAGE_NAME: rules.slug(str(stage[STAGE_NAME])), **section})
        for place, texts in run.comments.items():
            if place[0] in section:
                result.comments[STAGES, number, *place] = texts
        for place, key in run.origins.items():
            result.origins[(STAGES, number, *place) if place[0] in section else place] = old_key(key)
        for old, new in ((run.left_out, result.left_out), (run.notes, result.notes)):
            renamed = [replace(setting, key=old_key(setting.key)) for setting in old]
            new += [setting for setting in renamed if setting not in new]
    return result


def _without_references(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``source`` with references to its own settings replaced by their values, since keys move.

    Interpolations of environment variables are kept.

    Raises:
        ConfigError: A reference does not resolve.
    """

    def replaced(value: Any, place: str, read: Callable[[], Any]) -> Any:
        """Return a value without references. ``read`` returns the value with all references resolved."""
        if isinstance(value, Mapping | list):
            config = read()
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inner = {str(key): replaced(item, f"{place}{key}.", partial(getitem, config, key)) for key, item in items}
            return inner if isinstance(value, Mapping) else list(inner.values())
        if not isinstance(value, str) or not _REFERENCE.search(value):
            return value
        try:
            resolved = read()
        except (OmegaConfBaseException, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(f"{place[:-1]}: {value!r} has no value: {reason}; write the value itself") from None
        if OmegaConf.is_config(resolved):
            return replaced(OmegaConf.to_container(resolved), place, lambda: resolved)
        # Trinity-RFT's sections give numbers from environment variables their type, so references to them are numbers
        typed = resolve_environment(value_at(source, value.removeprefix("${").removesuffix("}")))
        is_number = isinstance(typed, int | float) and str(typed) == resolved
        return typed if is_number else escape_interpolations(resolved)

    try:
        whole = OmegaConf.create(dict(source), flags={"allow_objects": True})
        result: dict[str, Any] = replaced(source, "", lambda: whole)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise ConfigError("a reference leads to itself: write the value itself") from None
    return result


def as_yaml(settings: Mapping[str, Any], comments: Mapping[Path, Sequence[str]]) -> str:
    """Return ``settings`` as YAML.

    Args:
        settings: Nested mappings, which may contain lists of mappings or values.
        comments: Comments by place, such as ``("buffer", "eval_tasksets", 0, "path")``.
    """
    return "".join(f"{line}\n" for line in _mapping(settings, comments, (), ""))


def _mapping(
    settings: Mapping[str, Any], comments: Mapping[Path, Sequence[str]], place: Path, indent: str
) -> Iterator[str]:
    for key, value in settings.items():
        here = (*place, key)
        for comment in comments.get(here, ()):
            yield from comment_lines(comment, indent)
        if isinstance(value, Mapping) and value:
            yield _key(key, indent)
            yield from _mapping(value, comments, here, indent + "  ")
        elif _are_sections(value):
            yield _key(key, indent)
            for number, item in enumerate(value):
                lines = list(_mapping(item, comments, (*here, number), indent + "    "))
                first = next(place for place, line in enumerate(lines) if not line.lstrip().startswith("#"))
                yield from lines[:first]
                yield f"{indent}  - {lines[first].lstrip()}"
                yield from lines[first + 1 :]
        else:
            yield f"{_key(key, indent)} {_value(value)}"


def _key(key: str, indent: str) -> str:
    """Return a key with its colon, which stands in the next line after a key that is too long for one line."""
    name = _value(key)
    return f"{indent}{name}:" if len(name) <= WIDTH else f"{indent}? {name}\n{indent}:"


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a comment as lines of YAML. Ends of lines and control characters become spaces."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")


def _value(value: Any) -> str:
    """Return a key or a value as YAML, a text in one line."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    shown = yaml.safe_dump(
        value, default_style=style, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return shown.removesuffix("\n").removesuffix("\n...")
