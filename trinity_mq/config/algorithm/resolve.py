"""Resolves the algorithm section: preset pieces, overridden by the user's, with names of Trinity-RFT translated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import ALIASES, PRESETS, Preset
from trinity_mq.config.algorithm.translate import take_trinity_names
from trinity_mq.config.algorithm.trinity_losses import OF_PLUGINS, merged_piece


def preset_of(name: Any) -> Preset:
    """Return the preset of an ``algorithm_type``.

    Raises:
        ValueError: No preset has this name; the message suggests similar names.
    """
    preset = PRESETS.get(canonical_name(name))
    if preset is None:
        near = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        names = ", ".join(sorted(PRESETS))
        raise ValueError(f"algorithm_type {name!r} is not known, wanted one of {names}, or {OF_PLUGINS}{hint}")
    return preset


def canonical_name(name: Any) -> str:
    """Return the preset's name for ``name``, which may be the name that another library uses."""
    return ALIASES.get(str(name), str(name))


def resolve_algorithm(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with every piece in full: the defaults, overridden by the preset, overridden by ``data``.

    A piece in ``data`` with the preset's kind, or without a kind, keeps the preset's other fields. A piece with another
    kind replaces the preset's piece. Names of Trinity-RFT are translated.
    """
    name = data.get("algorithm_type", "grpo")
    preset = preset_of(name)
    result: dict[str, Any] = {"repeat_times": preset.repeat_times, "optimizer": {"lr": preset.lr}}
    result |= LossConfig().model_dump()
    user_settings = {key: _plain(key, value) for key, value in data.items()}
    estimator = {} if "advantage_fn" in user_settings else {"estimator": preset.estimator}
    loss = {key: value for key, value in preset.loss.items() if key == "kl" or "policy_loss_fn" not in user_settings}
    for layer in (estimator, loss, take_trinity_names(user_settings, canonical_name(name), preset), user_settings):
        for key, value in layer.items():
            result[key] = merged_piece(result.get(key), value)
    return {**result, "algorithm_type": canonical_name(name)}


def _plain(key: str, value: Any) -> Any:
    """Return a section as a mapping; ``optimizer`` without unset fields, so that the preset's learning rate stays."""
    return value.model_dump(exclude_unset=key == "optimizer") if isinstance(value, BaseModel) else value
