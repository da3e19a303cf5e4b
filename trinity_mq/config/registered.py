"""Names that the user's modules in ``plugin_dirs`` register with decorators of Trinity-RFT, in a configuration: they
become the dotted paths of the registered classes, or the pieces of an algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.resolve import canonical_name
from trinity_mq.config.base import expand_user
from trinity_mq.config.plugin_files import Registration, find_registered

ALGORITHM_DEFAULTS = {"policy_loss_fn": "ppo", "advantage_fn": "ppo", "kl_loss_fn": "k2"}
"""Functions that a registered algorithm has if its ``default_config`` does not name them, as in Trinity-RFT."""
KEPT_PIECES = ("weights", "ce_schedule")
"""Pieces of a preset that stay with a registered loss: they decide which experiences are trained on."""
FUNCTIONS = {
    "policy_loss_fn": "POLICY_LOSS_FN",
    "advantage_fn": "ADVANTAGE_FN",
    "kl_loss_fn": "KL_FN",
    "entropy_loss_fn": "ENTROPY_LOSS_FN",
}
"""Registry by setting of the section ``algorithm``."""

NAMED_SETTINGS = {
    "buffer.taskset.data_selector.selector_type": "SELECTORS",
    "buffer.tasksets.data_selector.selector_type": "SELECTORS",
    "buffer.eval_tasksets.data_selector.selector_type": "SELECTORS",
    "buffer.trainer_input.experience_buffer.schema_type": "FORMATTER",
    "buffer.trainer_input.auxiliary_buffers.*.schema_type": "FORMATTER",
    "buffer.trainer_input.replay.priority_fn": "PRIORITY_FUNC",
}
"""Registry by setting whose value becomes a dotted path."""


def take_registered_names(data: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with registered names replaced. A registered name takes precedence over a built-in name,
    as in Trinity-RFT. Other names are left as they are.

    Raises:
        ValueError: Several modules register a name, or a registered algorithm cannot be read.
    """
    names = data.get("plugin_dirs")
    names = names if isinstance(names, list | tuple) else ()
    paths = [expand_user(name) for name in names if isinstance(name, str)]
    folders = [path for path in paths if path.is_dir()]  # a missing folder is an error when plug-ins are added
    result = dict(data)
    if isinstance(algorithm := data.get("algorithm"), Mapping):
        result["algorithm"] = _algorithm(dict(algorithm), folders)
    for key, registry in NAMED_SETTINGS.items():
        result = _with_paths(result, key.split("."), registry, folders)
    return result


def _find(folders: Sequence[Path], registry: str, name: Any) -> tuple[str, Registration | None] | None:
    """Return dotted path and registration of a name: registered, or a dotted path itself. None: neither."""
    if not isinstance(name, str):
        return None
    place = find_registered(folders, [registry], registry, name)
    return (name, None) if place is None and "." in name else place


def _algorithm(section: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    section = _algorithm_type(section, folders)
    places = {key: _find(folders, registry, section.get(key)) for key, registry in FUNCTIONS.items()}
    for key, place in places.items():
        if place is None:
            continue
        path, registration = place
        del section[key]
        args = section.pop(f"{key}_args", None)
        piece: dict[str, Any] = {"kind": path, "args": dict(args) if isinstance(args, Mapping) else args or {}}
        if key == "policy_loss_fn":
            takes = () if registration is None else registration.parameters
            piece |= {"reference": True} if {"ref_logprob", "ref_log_prob"} & {*takes} else {}
            section |= _loss(piece, section)
        elif key == "advantage_fn":
            section["estimator"] = {**piece, "compares": False}
        elif key == "kl_loss_fn":
            section |= {"kl": None, "kl_loss": piece}
        else:
            section["entropy_loss"] = piece
    return section


def _loss(piece: dict[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pieces of a section with a registered loss; the preset's loss is replaced, except ``KEPT_PIECES``."""
    preset = PRESETS.get(canonical_name(section.get("algorithm_type", "grpo")))
    kept = {} if preset is None else {key: preset.loss[key] for key in KEPT_PIECES if key in preset.loss}
    return {"policy_loss_fn": "ppo", "surrogate": piece, **{key: section.get(key, kept[key]) for key in kept}}


def _algorithm_type(section: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the section with a registered algorithm replaced by its ``default_config``, below the user's settings."""
    path, registration = _find(folders, "ALGORITHM_TYPE", section.get("algorithm_type")) or ("", None)
    if registration is None:
        return section
    if not registration.defaults:
        raise ValueError(
            f"algorithm_type {registration.name!r} is {path}, whose default_config does not return a literal dict, "
            'wanted `return {"policy_loss_fn": ..., "advantage_fn": ...}`: it is read without executing the module'
        )
    schema = registration.attributes.get("schema")
    base = schema if schema in {"sft", "dpo", "cpt"} else "grpo"
    defaults = (ALGORITHM_DEFAULTS if base == "grpo" else {}) | dict(registration.defaults)
    result = defaults | section | {"algorithm_type": base}
    if result.get("sample_strategy") in ("default", "warmup", "staleness_control"):
        del result["sample_strategy"]
    if result.get("entropy_loss_fn") in ("default", "none", "mix") and "entropy_loss_fn" not in section:
        del result["entropy_loss_fn"]
    return result


def _with_paths(section: Any, keys: Sequence[str], registry: str, folders: Sequence[Path]) -> Any:
    """Return a section whose settings have the dotted paths of their registered names.

    Args:
        section: A section, or a list of sections.
        keys: Keys that lead to the settings; ``*`` stands for each key.
        registry: Registry of the names.
        folders: Folders of the modules that register the names.
    """
    if isinstance(section, list | tuple):
        return [_with_paths(item, keys, registry, folders) for item in section]
    if not isinstance(section, Mapping):
        return section
    first, *rest = keys
    result = dict(section)
    for key in section if first == "*" else {first} & section.keys():
        if rest:
            result[key] = _with_paths(section[key], rest, registry, folders)
        elif (place := _find(folders, registry, section[key])) is not None:
            result[key] = place[0]
    return result
