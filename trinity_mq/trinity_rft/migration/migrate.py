"""Translates a configuration of Trinity-RFT, lists its changes and the settings that it left out, and writes YAML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_mq.config.loading.load import STAGES, ConfigError
from trinity_mq.config.loading.stages import STAGE_NAME
from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import ACCEPTED, trinity_key_advice, trinity_names
from trinity_mq.trinity_rft.migration import algorithm, data, limits, rules, verl
from trinity_mq.trinity_rft.migration.transfer import (
    Comments,
    LeftOut,
    Path,
    SettingsTransfer,
    is_config_key,
    resolve_environment,
)

RULES = {
    rule.__name__: rule
    for rule in (
        rules.auxiliary_models,
        data.batch_sizes,
        rules.checkpoints,
        rules.data_type,
        rules.engine_options,
        rules.explorer,
        rules.lora,
        algorithm.losses,
        rules.mode,
        rules.model,
        rules.monitor,
        rules.names,
        data.operators,
        data.packs,
        algorithm.optimizer,
        rules.synchronizer,
        data.tasksets,
        rules.template,
        rules.thinking,
        rules.truncation,
        rules.external_evaluation,
        rules.gateway,
        limits.truncated_sampling,
        limits.timeouts,
        limits.lookahead,
        limits.retention,
        data.trainer_input,
        verl.verl,
    )
}
"""Rules of the table of names."""
WIDTH = 116
"""Maximum number of characters in a comment line."""
_REFERENCE = re.compile(r"\$\{(?!oc\.env:|env:)")


@dataclass(frozen=True, slots=True)
class Migration:
    """A configuration, ready to be written."""

    settings: dict[str, Any]
    """Settings of the new configuration, by section."""
    comments: Mapping[Path, Sequence[str]]
    """Comments on changes, by the place of a setting."""
    left_out: Sequence[LeftOut]
    """Settings without a counterpart here."""
    notes: Sequence[LeftOut] = ()
    """Settings that need something on this machine, which their reason names."""
    origins: Mapping[Path, str] = field(default_factory=dict)
    """Dotted keys of the old configuration, by the place of the setting that was made of each."""

    def origin_of(self, place: Path) -> str:
        """Return the dotted key of the old configuration that a setting or its section was made of, empty if none."""
        for length in range(len(place), 1, -1):
            if (origin := self.origins.get(place[:length])) is not None:
                return ".".join([origin, *map(str, place[length:])])
        return ""


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
    if not stages:
        comments = Comments()
        return Migration(_run(resolved, comments), comments.at, comments.left_out, comments.notes, comments.origins)
    return _stages(resolved, stages)


def _run(source: Mapping[str, Any], comments: Comments) -> dict[str, Any]:
    """Return the settings of one run."""
    move = SettingsTransfer(source, comments)
    applied = set[str]()
    for row in trinity_names():
        if row.rule == ACCEPTED:
            move.keep(row.old)
        elif not row.rule:
            move.apply(row)
        elif row.rule not in applied:
            applied.add(row.rule)
            RULES[row.rule](move)
    for key, _ in list(move.rest()):
        if is_config_key(key):
            move.keep(key)
        else:
            move.leave_out(key, trinity_key_advice(key.split(".")) or "no counterpart here")
    known_order = [*Config.model_fields]
    return {
        key: _ordered(move.settings[key])
        for key in sorted(move.settings, key=known_order.index)
        if move.settings[key] != {}
    }


def _ordered(section: Any) -> Any:
    """Return a section with its plain values before its subsections."""
    if isinstance(section, list):
        return [_ordered(item) for item in section]
    if not isinstance(section, Mapping):
        return section
    inner = {key: value for key, value in section.items() if _is_section(value)}
    return {key: value for key, value in section.items() if key not in inner} | {
        key: _ordered(value) for key, value in inner.items()
    }


def _is_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _stages(base: Mapping[str, Any], stages: Any) -> Migration:
    """Return several runs, one after another.

    A stage of Trinity-RFT replaces whole sections; here a stage is merged into them. So each stage is migrated as a
    complete run, and the sections that all runs have in common are written once.
    """
    if not isinstance(stages, list) or not all(
        isinstance(stage, Mapping) and stage.get(STAGE_NAME) for stage in stages
    ):
        raise ConfigError(f"{STAGES}: wanted a list of settings with a {STAGE_NAME} each, got {stages!r}")
    runs, run_comments = [], []
    for stage in stages:
        stage_settings = {key: value for key, value in stage.items() if key != STAGE_NAME and value is not None}
        comments = Comments()
        runs.append(_run({**base, **stage_settings}, comments))
        run_comments.append(comments)
    shared = {key: value for key, value in runs[0].items() if all(run.get(key) == value for run in runs)}
    settings: dict[str, Any] = {**shared, STAGES: []}
    origins = {place: key for place, key in run_comments[0].origins.items() if place[0] in shared}
    at: dict[Path, Sequence[str]] = {place: words for place, words in run_comments[0].at.items() if place[0] in shared}
    for number, (stage, run, comments) in enumerate(zip(stages, runs, run_comments, strict=True)):
        stage_settings = {key: value for key, value in run.items() if key not in shared}
        settings[STAGES].append({STAGE_NAME: rules.slug(str(stage[STAGE_NAME])), **stage_settings})
        at |= {(STAGES, number, *place): words for place, words in comments.at.items() if place[0] not in shared}
        origins |= {
            (STAGES, number, *place): f"{STAGES}.{number}.{key}" if key.split(".")[0] in stage else key
            for place, key in comments.origins.items()
            if place[0] not in shared
        }
    left_out = {
        (setting.key, repr(setting.value)): setting for comments in run_comments for setting in comments.left_out
    }
    notes = [note for comments in run_comments for note in comments.notes]
    return Migration(settings, at, list(left_out.values()), notes, origins)


def _without_references(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``source`` with references to its own settings replaced by their values, since keys move.

    Interpolations of environment variables are kept.

    Raises:
        ConfigError: A reference does not resolve.
    """
    try:
        whole = OmegaConf.create(dict(source), flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None

    def replaced(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): replaced(inner, f"{place}.{key}".lstrip(".")) for key, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
        if not isinstance(value, str) or not _REFERENCE.search(value):
            return value
        try:
            resolved = OmegaConf.select(whole, place)
        except (OmegaConfBaseException, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(f"{place}: {value!r} has no value: {reason}; write the value itself") from None
        if OmegaConf.is_config(resolved):
            return OmegaConf.to_container(resolved)
        # Trinity-RFT's sections give numbers from environment variables their type, so references to them are numbers
        typed = resolve_environment(_value_of(source, value))
        return typed if isinstance(typed, int | float) and str(typed) == resolved else resolved

    result: dict[str, Any] = replaced(dict(source), "")
    return result


def _value_of(source: Mapping[str, Any], reference: str) -> Any:
    """Return the value that a text names if it is one reference such as ``${model.max_model_len}``, else None."""
    here: Any = source
    for part in reference.removeprefix("${").removesuffix("}").split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here


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
            yield f"{indent}{key}:"
            yield from _mapping(value, comments, here, indent + "  ")
        elif isinstance(value, Sequence) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{key}:"
            for number, item in enumerate(value):
                lines = list(_mapping(item, comments, (*here, number), indent + "    "))
                first = next(place for place, line in enumerate(lines) if not line.lstrip().startswith("#"))
                yield from lines[:first]
                yield f"{indent}  - {lines[first].lstrip()}"
                yield from lines[first + 1 :]
        else:
            yield f"{indent}{key}: {_value(value)}"


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a comment as lines of YAML."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")


def _value(value: Any) -> str:
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return shown.removesuffix("\n").removesuffix("\n...")
