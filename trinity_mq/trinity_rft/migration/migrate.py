"""Translates a configuration of Trinity-RFT, and lists its changes and the settings that it left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.config.loading.from_trinity import trinity_key_advice
from trinity_mq.config.loading.load import STAGES, ConfigError
from trinity_mq.config.loading.stages import STAGE_NAME
from trinity_mq.config.run import Config
from trinity_mq.trinity_rft.migration.algorithm import algorithm
from trinity_mq.trinity_rft.migration.data import buffer
from trinity_mq.trinity_rft.migration.explorer import explorer
from trinity_mq.trinity_rft.migration.model import model
from trinity_mq.trinity_rft.migration.move import Comments, LeftOut, Path, SettingsTransfer, is_config_key
from trinity_mq.trinity_rft.migration.trainer import trainer
from trinity_mq.trinity_rft.migration.values import resolve_environment, without_references

RULES = (algorithm, model, buffer, explorer, trainer)
MODES = {"both": "both", "colocate": "both", "train": "train", "explore": "explore", "bench": "bench"}
"""Modes of Trinity-RFT, and the corresponding modes here."""
UNUSED = {
    "project": "a run has a name alone",
    "group": "a run has a name alone",
    "ray_namespace": "there is no Ray",
    "continue_from_checkpoint": "a run that was started before resumes; `trinity-mq run --fresh` starts over",
    "ignore_validator_suggestions": "`trinity-mq validate` suggests nothing, it finds errors",
    "log": "logs are in the run's folder",
}
"""Top-level settings that a run does not need."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A configuration, ready to be written."""

    settings: dict[str, Any]
    """Settings of the new configuration, by section."""
    comments: Mapping[Path, Sequence[str]]
    """Comments on changes, by the place of a setting."""
    left_out: Sequence[LeftOut]
    """Settings without a counterpart here."""


def migrate(source: Mapping[str, Any]) -> Migration:
    """Return a configuration that does the same here as ``source`` does with Trinity-RFT.

    Interpolations of environment variables are kept. Defaults of Trinity-RFT that differ from the defaults here are
    written explicitly.

    Raises:
        ConfigError: ``source`` is not a configuration of Trinity-RFT, or contains a dangling reference.
    """
    if not any(isinstance(source.get(section), Mapping) for section in ("model", "buffer", "algorithm")):
        raise ConfigError(
            f"is not a configuration of Trinity-RFT: it has {', '.join(map(str, source)) or 'nothing'}, wanted "
            "sections such as algorithm, model and buffer"
        )
    resolved = without_references(source)
    stages = resolved.pop(STAGES, None)
    if not stages:
        comments = Comments()
        return Migration(_run(resolved, comments), comments.at, comments.left_out)
    return _stages(resolved, stages)


def _run(source: Mapping[str, Any], comments: Comments) -> dict[str, Any]:
    """Return the settings of one run."""
    move = SettingsTransfer(source, comments)
    _names(move)
    for rule in RULES:
        rule(move)
    _mode(move)
    for name, reason in UNUSED.items():
        for key in [key for key, _ in move.rest() if key == name or key.startswith(f"{name}.")]:
            move.leave_out(key, reason, matters=False)
    for key in [key for key, _ in move.rest() if key.startswith("cluster.")]:
        move.leave_out(key, "agents find each other at the broker", matters=False)
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


def _names(move: SettingsTransfer) -> None:
    old_name = move.take("name") or "rft"
    name = slug(str(resolve_environment(old_name) or "run"))
    move.put("name", name, *([f"was {old_name}"] if name != old_name else []))
    root, exact = move.take("checkpoint_root_dir"), move.take("checkpoint_job_dir")
    if exact or root:
        folders = (root, move.peek("project"), move.peek("group"), old_name)
        place = exact or "/".join(str(part).rstrip("/") for part in folders if part)
        move.put("run_dir", place, "where Trinity-RFT has its checkpoints; without it: runs/<name>")


def _mode(move: SettingsTransfer) -> None:
    mode = move.take("mode")
    chosen = MODES.get(str(resolve_environment(mode))) if mode is not None else None
    if chosen is not None:
        move.put("mode", chosen, *([f"was {mode}: trainer and engines may share a GPU"] if chosen != mode else []))
    elif mode is not None:
        move.lost(LeftOut("mode", mode, f"modes are {', '.join(sorted(set(MODES.values())))}", matters=True))


def slug(text: str) -> str:
    """Return a valid run name made from ``text``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "run"


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
    at: dict[Path, Sequence[str]] = {place: words for place, words in run_comments[0].at.items() if place[0] in shared}
    for number, (stage, run, comments) in enumerate(zip(stages, runs, run_comments, strict=True)):
        stage_settings = {key: value for key, value in run.items() if key not in shared}
        settings[STAGES].append({STAGE_NAME: slug(str(stage[STAGE_NAME])), **stage_settings})
        at |= {(STAGES, number, *place): words for place, words in comments.at.items() if place[0] not in shared}
    left_out = {
        (setting.key, repr(setting.value)): setting for comments in run_comments for setting in comments.left_out
    }
    return Migration(settings, at, list(left_out.values()))
