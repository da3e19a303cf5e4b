"""Two configurations of Trinity-RFT that are one run: an explorer in a process of its own, and its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.config.loading.load import ConfigError, read_file
from trinity_mq.trinity_rft.migration.transfer import LeftOut, resolve_environment, value_at

HALVES = {"explore": "train", "train": "explore"}
"""Mode of the other half, by the mode of a half."""
EXPERIENCES = "buffer.trainer_input.experience_buffer"
OF_TRAINER = ("algorithm", "trainer")
"""Sections whose settings come from the trainer's file if both files have them. In all other sections the explorer's
file takes precedence."""
OF_EXPLORER = ("algorithm.repeat_times",)
"""Settings in the sections :data:`OF_TRAINER` for which the explorer's file takes precedence nevertheless."""
MAX_FILES = 100
"""Maximum number of files in a folder that are searched for the other half."""


def other_half(path: Path, source: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the other half of the run of ``path`` from the same folder. None: the folder does not contain it.

    Halves have the same project, group and name, the modes explore and train, and the same queue of experiences.
    """
    wanted = HALVES.get(_mode(source))
    if wanted is None or not path.parent.is_dir():
        return None
    for sibling in sorted({*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")} - {path})[:MAX_FILES]:
        try:
            settings = read_file(sibling)
        except ConfigError:  # a file of something else
            continue
        if _mode(settings) == wanted and _identity(settings) == _identity(source):
            return sibling, settings
    return None


def half_mode(source: Mapping[str, Any]) -> str:
    """Return ``explore`` or ``train``, the mode of a configuration that is one half of a run: a queue passes its
    experiences to or from another process. Return an empty text for any other configuration.
    """
    has_records = str(resolve_environment(value_at(source, "algorithm.algorithm_type"))) in {"sft", "dpo", "cpt"}
    return _mode(source) if _mode(source) in HALVES and _storage(source) == "queue" and not has_records else ""


def join_halves(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return one configuration for both agents of a run, and the settings of a half that the other half overrides."""
    overridden: list[LeftOut] = []
    explorer, trainer = (first, second) if _mode(first) == "explore" else (second, first)
    result = _merged(trainer, explorer, "", overridden, in_trainer=False)
    result["mode"] = "both"
    return result, overridden


def _merged(
    trainer: Mapping[str, Any], explorer: Mapping[str, Any], prefix: str, overridden: list[LeftOut], *, in_trainer: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in dict.fromkeys([*explorer, *trainer]):
        place = f"{prefix}{key}"
        theirs, ours = trainer.get(key), explorer.get(key)
        if place == "mode" or theirs is None or ours is None or theirs == ours:
            result[key] = theirs if ours is None else ours
        elif isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            inside = in_trainer or place in OF_TRAINER
            result[key] = _merged(theirs, ours, f"{place}.", overridden, in_trainer=inside)
        else:
            trainer_counts = in_trainer and place not in OF_EXPLORER
            result[key] = theirs if trainer_counts else ours
            agent, value = ("explorer", ours) if trainer_counts else ("trainer", theirs)
            reason = f"the {agent}'s file has it, and the other file's {result[key]!r} counts"
            overridden.append(LeftOut(place, value, reason, matters=True))
    return result


def _mode(settings: Mapping[str, Any]) -> str:
    return str(resolve_environment(settings.get("mode")) or "both")


def _storage(settings: Mapping[str, Any]) -> str:
    return str(resolve_environment(value_at(settings, f"{EXPERIENCES}.storage_type")) or "queue")


def _identity(settings: Mapping[str, Any]) -> list[Any]:
    names = [settings.get(key) or "" for key in ("project", "group", "name")]
    return [*names, *(value_at(settings, f"{EXPERIENCES}.{key}") for key in ("name", "path")), _storage(settings)]
