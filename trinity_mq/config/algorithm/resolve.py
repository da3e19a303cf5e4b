"""Resolves the algorithm section: the preset's pieces, and over them the user's, names of Trinity-RFT translated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import ALIASES, PRESETS, Preset
from trinity_mq.config.algorithm.translate import translated


def preset_of(name: Any) -> Preset:
    """Return the preset of an ``algorithm_type``.

    Raises:
        ValueError: There is none of that name; says which are near.
    """
    found = PRESETS.get(canonical(name))
    if found is None:
        near = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"algorithm_type {name!r} is not known, wanted one of {', '.join(sorted(PRESETS))}{hint}")
    return found


def canonical(name: Any) -> str:
    """Return our name of an algorithm."""
    return ALIASES.get(str(name), str(name))


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with every piece in full: defaults, then the preset's, then what ``data`` says.

    A piece that ``data`` names by the preset's kind, or without a kind, keeps the preset's other fields; one of another
    kind replaces it. Names of Trinity-RFT are translated.
    """
    name = data.get("algorithm_type", "grpo")
    preset = preset_of(name)
    result: dict[str, Any] = {"repeat_times": preset.repeat_times, "optimizer": {"lr": preset.lr}}
    result |= LossConfig().model_dump()
    own = {key: _plain(key, value) for key, value in data.items()}
    estimator = {} if "advantage_fn" in own else {"estimator": preset.estimator}
    loss = {key: value for key, value in preset.loss.items() if key == "kl" or "policy_loss_fn" not in own}
    for layer in (estimator, loss, translated(own, preset), own):
        for key, value in layer.items():
            result[key] = _merged(result.get(key), value)
    return {**result, "algorithm_type": canonical(name)}


def _plain(key: str, value: Any) -> Any:
    """Return a section as a mapping; ``optimizer`` without its unset fields, so that the preset's rate stays."""
    return value.model_dump(exclude_unset=key == "optimizer") if isinstance(value, BaseModel) else value


def _merged(below: Any, above: Any) -> Any:
    """Return ``above`` over ``below``: field by field where both are the same kind of piece."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    same = above.get("kind", below.get("kind")) == below.get("kind")
    return {**below, **above} if same else above
