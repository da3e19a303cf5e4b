"""Names of Trinity-RFT's algorithm section and the corresponding names here: one table for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.config.algorithm.presets import CLIP, PRESETS, Preset
from trinity_mq.config.estimators import FIELDS
from trinity_mq.config.trinity_names import trinity_names

CRITIC, CONFIG = "algorithm.critic.", "trainer.trainer_config."
"""The section of the critic here, and veRL's own configuration in Trinity-RFT."""


def _same(*names: str) -> dict[str, str]:
    """Return names that are the same here."""
    return {name: name for name in names}


SURROGATE_KEYS = {
    "clip_range": ("low", "high"),
    "clip_range_low": ("low",),
    "clip_range_high": ("high",),
    "clip_ratio_c": ("dual",),
}
"""Settings of clipped losses, and the corresponding fields of ``surrogate``."""

ESTIMATOR_KEYS = {
    "std_level": "scale",
    "std_epsilon": "epsilon",
    "std_cal_level": "scale",
    "opmd_baseline": "baseline",
    "enable_step_norm": "step_norm",
    "lambda_coef": "beta",
    "fnorm": "scale",
} | _same("epsilon", "std_threshold", "rank_penalty", "tau", "shift", "gamma", "lam", "omega", "drop", "kl_coef")
"""Settings of advantage functions, and the corresponding fields of ``estimator``."""
TOP_LEVEL = ("std_level", "std_epsilon", "kl_coef")
"""Settings of advantage functions that may also stand directly in the section. Null there counts as unset."""
ESTIMATOR_VALUES = {("std_cal_level", "batch"): "batch_raw", ("fnorm", "std"): "group"}

ADVANTAGES = _same(
    "ppo", "grpo", "rloo", "reinforceplusplus", "remax", "opmd", "asymre", "rec", "gigpo", "on_policy_distill", "jsd"
) | {"step_wise_grpo": "multi_step_grpo", "reinforce": "topr"}
"""Preset with the same estimator by ``advantage_fn`` of Trinity-RFT."""

POLICY_LOSSES = _same(
    "gspo", "sapo", "cispo", "topr", "sppo", "rec", "importance_sampling", "sft", "sft_is", "sft_phi", "mix",
    "mix_chord", "dpo",
) | {"opmd": "asymre"}  # fmt: skip
"""Preset with the same loss, reference term aside, by ``policy_loss_fn`` of Trinity-RFT except ``ppo``."""

REDUCTIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""Kinds of ``reduction`` by ``loss_agg_mode`` of Trinity-RFT."""

KL_KINDS = _same("k1", "k2", "k3", "abs") | {"low_var_kl": "k3_clamped", "corrected_k3": "k3_weighted"}
"""Kinds of ``kl`` by ``kl_loss_fn`` of Trinity-RFT."""


REWARD_KL_KINDS = KL_KINDS | {"corrected_k3": "k3"}
"""Kinds of ``reward_kl``, which has no ratio for a correction, by ``kl_penalty_fn`` of Trinity-RFT."""
REWARD_KL_KEYS = {"kl_coef": "coef", "target_kl": "target", "horizon": "horizon"}
"""Fields of ``reward_kl`` by ``kl_penalty_fn_args`` except ``adaptive``."""


def take_trinity_names(user_settings: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Remove names of Trinity-RFT from ``user_settings`` and return the corresponding pieces.

    Raises:
        ValueError: A name has no meaning for the algorithm, or a value is unknown.
    """
    result: dict[str, Any] = {}
    if (name := user_settings.pop("advantage_fn", None)) is not None:
        result["estimator"] = dict(PRESETS[_lookup("advantage_fn", name, ADVANTAGES)].estimator)
    if (name := user_settings.pop("policy_loss_fn", None)) is not None:
        plain = {"surrogate": CLIP} if name == "ppo" else None
        loss = plain or PRESETS[_lookup("policy_loss_fn", name, {"ppo": "", **POLICY_LOSSES})].loss
        result |= {key: value for key, value in loss.items() if key != "kl"}
    top_level = {name: user_settings.pop(name, None) for name in TOP_LEVEL}
    settings = {name: value for name, value in top_level.items() if value is not None}
    if settings := settings | _arguments(user_settings, "advantage_fn_args"):
        base = result.get("estimator", preset.estimator)
        result["estimator"] = {**base, **_estimator_settings(settings, user_settings.get("estimator", base))}
    for section in ("policy_loss_fn_args", "entropy_loss_fn_args"):
        for name, value in _arguments(user_settings, section).items():
            user_settings.setdefault(name, value)
    surrogate: dict[str, Any] = {}
    for name, targets in SURROGATE_KEYS.items():
        if name in user_settings:
            surrogate |= dict.fromkeys(targets, user_settings.pop(name))
    if surrogate:
        base = {"kind": "clip", **(result.get("surrogate") or preset.loss.get("surrogate") or {})}
        if (kind := (user_settings.get("surrogate") or base).get("kind", base["kind"])) != "clip":
            raise ValueError(f"a clip range has no meaning for the surrogate {kind!r}; set the fields of surrogate")
        result["surrogate"] = {**base, **surrogate}
    if "loss_agg_mode" in user_settings:
        result["reduction"] = {"kind": _lookup("loss_agg_mode", user_settings.pop("loss_agg_mode"), REDUCTIONS)}
    return result | _kl_terms(user_settings, preset)


def _kl_terms(user_settings: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Remove the KL to a reference from ``user_settings``, and return the ``kl`` and ``reward_kl`` that it sets."""
    result: dict[str, Any] = {}
    args = _arguments(user_settings, "kl_loss_fn_args")
    if (kind := user_settings.pop("kl_loss_fn", None)) is not None:
        term = {"kind": _lookup("kl_loss_fn", kind, {"none": "", **KL_KINDS}), "coef": args.get("kl_coef", 0.001)}
        result["kl"] = term if kind != "none" else None
    elif "kl_coef" in args and preset.loss.get("kl"):
        result["kl"] = {**preset.loss["kl"], "coef": args["kl_coef"]}
    args = _arguments(user_settings, "kl_penalty_fn_args")
    if (kind := user_settings.pop("kl_penalty_fn", None)) is not None:
        result["reward_kl"] = None if kind == "none" else _reward_kl(kind, args)
    return result


def _reward_kl(kind: str, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``reward_kl`` from ``kl_penalty_fn`` and its arguments, None if its weight is 0."""
    adaptive = bool(args.get("adaptive"))
    if unknown := args.keys() - REWARD_KL_KEYS.keys() - {"adaptive"}:
        raise ValueError(
            f"kl_penalty_fn_args.{min(unknown)} is not known, wanted one of adaptive, {', '.join(REWARD_KL_KEYS)}"
        )
    if adaptive and None in (args.get("target_kl"), args.get("horizon")):
        raise ValueError(
            "kl_penalty_fn_args.adaptive is true without target_kl or horizon, wanted both: the KL in nats a token to "
            "hold, and the samples over which its weight changes by a fifth"
        )
    values = {name: args[key] for key, name in REWARD_KL_KEYS.items() if args.get(key) is not None}
    fields = values if adaptive else {name: value for name, value in values.items() if name == "coef"}
    term = {"kind": _lookup("kl_penalty_fn", kind, REWARD_KL_KINDS), "coef": 0.001, **fields}
    return term if term["coef"] else None


def _estimator_settings(settings: Mapping[str, Any], estimator: Any) -> dict[str, Any]:
    """Return settings of an advantage function as fields of the estimator."""
    kind = estimator.get("kind") if isinstance(estimator, Mapping) else estimator
    result = {}
    for name, value in settings.items():
        if name == "std_normalize":
            result["scale"] = "population" if value else "none"
        elif name not in ESTIMATOR_KEYS:
            raise ValueError(f"advantage_fn_args.{name} is not known, wanted one of {', '.join(ESTIMATOR_KEYS)}")
        elif name == "kl_coef" and kind not in {"distill", "jsd"}:
            raise ValueError(
                f"kl_coef has no meaning for the estimator {kind!r}; for a KL term set kl: {{kind: k2, coef: {value}}}"
            )
        elif (
            name in TOP_LEVEL and isinstance(kind, str) and kind in FIELDS and ESTIMATOR_KEYS[name] not in FIELDS[kind]
        ):
            raise ValueError(f"{name} has no meaning for the estimator {kind!r}: remove it, or set it to null")
        else:
            is_plain = not isinstance(value, dict | list)  # the model of the estimator refuses others
            result[ESTIMATOR_KEYS[name]] = ESTIMATOR_VALUES.get((name, value), value) if is_plain else value
    return result


def _arguments(user_settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove the arguments called ``name`` from ``user_settings`` and return them.

    Raises:
        ValueError: They are not a mapping of names to values.
    """
    value = user_settings.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, wanted settings by name, such as {{epsilon: 1.0e-6}}")
    return dict(value)


def _lookup(name: str, value: Any, table: Mapping[str, str]) -> str:
    if isinstance(value, dict | list) or value not in table:
        raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(table)}")
    return table[value]


def move_critic_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with Trinity-RFT's critic settings moved from ``trainer`` to ``algorithm.critic``.
    Settings that ``algorithm.critic`` already has take precedence.

    Raises:
        ValueError: ``trainer.trainer_config`` contains other settings.
    """
    trainer, algorithm = data.get("trainer"), data.get("algorithm") or {}
    if not isinstance(trainer, Mapping) or not isinstance(algorithm, Mapping):
        return data
    keys = {row.old: row.new.removeprefix(CRITIC) for row in trinity_names() if row.new.startswith(CRITIC)}
    flat = _flat({key: trainer[key] for key in ("critic_warmup", "trainer_config") if trainer.get(key) is not None})
    if unknown := {f"trainer.{key}" for key in flat} - keys.keys():
        valid = ", ".join(key.removeprefix(CONFIG) for key in keys if key.startswith(CONFIG))
        raise ValueError(
            f"{min(unknown)} is not supported: of trainer_config only {valid} are read; remove it "
            "(docs/settings.md lists the settings of trinity-mq)"
        )
    critic = {keys[f"trainer.{key}"]: value for key, value in flat.items()} | dict(algorithm.get("critic") or {})
    remaining = {key: value for key, value in trainer.items() if key not in {"critic_warmup", "trainer_config"}}
    return data | {"trainer": remaining} | ({"algorithm": {**algorithm, "critic": critic}} if critic else {})


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their dotted keys."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result
