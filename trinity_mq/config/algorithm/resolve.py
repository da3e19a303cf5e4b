"""Resolves the algorithm section: the preset's pieces, and over them the user's, names of Trinity-RFT translated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import ALIASES, PRESETS, Preset

SURROGATE_KEYS = {
    "clip_range": ("low", "high"),
    "clip_range_low": ("low",),
    "clip_range_high": ("high",),
    "clip_ratio_c": ("dual",),
}
"""Settings of Trinity-RFT's and verl's clipped losses, and the fields of ``surrogate`` that they are."""

REDUCTIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""``loss_agg_mode`` of Trinity-RFT, and the kinds of ``reduction``."""

KL_KINDS = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "low_var_kl": "k3_clamped",
    "abs": "abs",
    "corrected_k3": "k3_weighted",
}
"""``kl_loss_fn`` of Trinity-RFT, and the kinds of ``kl``."""


def preset_of(name: Any) -> Preset:
    """Return the preset of an ``algorithm_type``.

    Raises:
        ValueError: There is none of that name; says which are near.
    """
    found = PRESETS.get(ALIASES.get(str(name), str(name)))
    if found is None:
        near = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"algorithm_type {name!r} is not known, wanted one of {', '.join(sorted(PRESETS))}{hint}")
    return found


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with every piece in full: defaults, then the preset's, then what ``data`` says.

    A piece that ``data`` names by the preset's kind, or without a kind, keeps the preset's other fields; one of another
    kind replaces it. Names of Trinity-RFT are translated.
    """
    preset = preset_of(data.get("algorithm_type", "grpo"))
    result: dict[str, Any] = {"repeat_times": preset.repeat_times, **LossConfig().model_dump()}
    own = {name: _plain(value) for name, value in data.items()}
    for layer in (preset.loss, translated(own, preset), own):
        for name, value in layer.items():
            result[name] = _merged(result.get(name), value)
    return result


def translated(own: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Take names of Trinity-RFT out of ``own`` and return what they mean as pieces.

    Raises:
        ValueError: A name has no meaning for the algorithm, or a value is not known.
    """
    result: dict[str, Any] = {}
    for section in ("policy_loss_fn_args", "kl_loss_fn_args", "entropy_loss_fn_args"):
        for name, value in (own.pop(section, None) or {}).items():
            own.setdefault({"kl_coef": "kl_loss_coef"}.get(name, name), value)
    surrogate: dict[str, Any] = {}
    for name, targets in SURROGATE_KEYS.items():
        if name in own:
            surrogate |= dict.fromkeys(targets, own.pop(name))
    if surrogate:
        kind = (own.get("surrogate") or preset.loss.get("surrogate") or {}).get("kind", "clip")
        if kind != "clip":
            raise ValueError(f"a clip range has no meaning for the surrogate {kind!r}; set the fields of surrogate")
        result["surrogate"] = surrogate
    if "loss_agg_mode" in own:
        result["reduction"] = {"kind": _known("loss_agg_mode", own.pop("loss_agg_mode"), REDUCTIONS)}
    if "kl_loss_fn" in own or "kl_loss_coef" in own:
        kind, coef = own.pop("kl_loss_fn", "k2"), own.pop("kl_loss_coef", 0.001)
        result["kl"] = None if kind == "none" else {"kind": _known("kl_loss_fn", kind, KL_KINDS), "coef": coef}
    return result


def _known(name: str, value: Any, table: Mapping[str, str]) -> str:
    if value not in table:
        raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(table)}")
    return table[value]


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def _merged(below: Any, above: Any) -> Any:
    """Return ``above`` over ``below``: field by field where both are the same kind of piece."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    same = above.get("kind", below.get("kind")) == below.get("kind")
    return {**below, **above} if same else above
