"""Translates ``rollout_correction`` of Trinity-RFT and verl into an anchor and corrections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

KEYS = (
    "bypass_mode", "loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
    "rollout_rs_threshold", "rollout_rs_threshold_lower",
)  # fmt: skip
"""Settings of the section."""
LEVELS = ("token", "sequence")
"""Values of ``rollout_is``, which are the levels of ``kind: weight``."""
OLDER = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Current names in ``rollout_rs``, by their names in verl 0.6, where the bounds applied to the ratio itself."""
UNITS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
"""Levels of ``kind: reject`` by the beginning of a name in ``rollout_rs``."""
_RULE = re.compile(r"(token|seq_sum|seq_mean|seq_max)_(k1|k2|k3)")


def correction_pieces(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pieces ``anchor``, ``correction`` and, for ``bypass_mode`` with the loss ``reinforce``, ``surrogate``.

    A weight is the ratio of two probabilities: of the policy at the start of the train step (with ``bypass_mode``: of
    the trained policy) and of the sampler. With ``bypass_mode`` the clipped loss gets no weights, since its ratio is
    the weight. Tokens that are left out count in the denominators here, and not in verl (verl 0.9.1,
    ``rollout_corr_helper``).

    Args:
        settings: The section ``rollout_correction``.

    Raises:
        ValueError: A setting is unknown or has no counterpart; the message names the missing capability.
    """
    rules = {key: value for key, value in settings.items() if value is not None}
    if unknown := [key for key in rules if key not in KEYS]:
        reason = "; a veto of a whole answer by one token has no counterpart" if "veto" in unknown[0] else ""
        raise ValueError(f"rollout_correction.{unknown[0]} is not known, wanted one of {', '.join(KEYS)}{reason}")
    bypass, loss = bool(rules.get("bypass_mode", False)), rules.get("loss_type", "ppo_clip")
    if loss not in ("ppo_clip", "reinforce"):
        raise ValueError(f"rollout_correction.loss_type is {loss!r}, wanted ppo_clip or reinforce")
    pieces: dict[str, Any] = {"anchor": "mu" if bypass else "old"}
    corrections = list(_rejections(rules))
    if not bypass or loss == "reinforce":
        corrections = [*_weights(rules), *corrections]
    if bypass and loss == "reinforce":
        pieces["surrogate"] = {"kind": "log_linear"}
    return {**pieces, "correction": corrections}


def _weights(rules: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    level = rules.get("rollout_is")
    if level is None:
        return
    if level not in LEVELS:
        raise ValueError(f"rollout_correction.rollout_is is {level!r}, wanted one of {', '.join(LEVELS)}")
    rule: dict[str, Any] = {"kind": "weight", "level": level}
    low, high = _bounds("rollout_is_threshold", rules.get("rollout_is_threshold", 2.0))
    rule |= {"high": high} if low is None else {"low": low, "high": high, "beyond": "mask"}
    if rules.get("rollout_is_batch_normalize"):
        if level == "sequence":
            raise ValueError(
                "rollout_correction.rollout_is_batch_normalize is true with rollout_is sequence, wanted token: weights "
                "are divided by their mean over tokens here, not by that over sequences"
            )
        rule["normalize"] = True
    yield rule


def _rejections(rules: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names = [name.strip() for name in str(rules.get("rollout_rs") or "").split(",") if name.strip()]
    if not names:
        return
    if "rollout_rs_threshold" not in rules:
        raise ValueError("rollout_correction.rollout_rs_threshold is missing, wanted the bounds of rollout_rs")
    bounds = [part.strip() for part in str(rules["rollout_rs_threshold"]).split(",") if part.strip()]
    if len(bounds) not in {1, len(names)}:
        raise ValueError(
            f"rollout_correction.rollout_rs_threshold has {len(bounds)} bounds, wanted 1 or {len(names)}, one for each "
            "name in rollout_rs"
        )
    for name, text in zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True):
        match = _RULE.fullmatch(OLDER.get(name, name))
        if match is None:
            raise ValueError(
                f"rollout_correction.rollout_rs is {name!r}, wanted token, seq_sum, seq_mean or seq_max and an "
                "estimate, such as seq_mean_k1"
            )
        low, high = _bounds("rollout_rs_threshold", text)
        rule: dict[str, Any] = {"kind": "reject", "estimate": match[2], "level": UNITS[match[1]], "high": high}
        if match[2] == "k1":
            lower = rules.get("rollout_rs_threshold_lower", low)
            rule["low"] = 1 / high if lower is None else _number("rollout_rs_threshold_lower", lower)
            if name in OLDER and lower is not None:
                rule |= {"low": 1 / rule["high"], "high": 1 / rule["low"]}
        yield rule


def _bounds(name: str, value: Any) -> tuple[float | None, float]:
    """Return a lower and an upper bound, written as ``upper`` or ``lower_upper``."""
    low, separator, high = str(value).rpartition("_")
    return (_number(name, low) if separator else None), _number(name, high)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"rollout_correction.{name} is {value!r}, wanted a number above 0, or two as 0.5_2.0")
    return number
