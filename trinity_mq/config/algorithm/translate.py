"""Names of Trinity-RFT's algorithm section and the corresponding names here: one table for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.config.algorithm.presets import CLIP, K2, PRESETS, Preset
from trinity_mq.config.algorithm.rollout_correction import correction_pieces
from trinity_mq.config.algorithm.trinity_losses import (
    BY_SURROGATE,
    POLICY_LOSSES,
    REDUCTIONS,
    argument_pieces,
    choice,
    merged,
    number_of,
    policy_loss_of,
    refuse_unknown,
)
from trinity_mq.config.estimators import FIELDS
from trinity_mq.config.trinity_names import trinity_names

CRITIC, CONFIG = "algorithm.critic.", "trainer.trainer_config."
"""Key prefixes of the critic's section here, and of veRL's configuration in Trinity-RFT."""


def _same(*names: str) -> dict[str, str]:
    """Return a table of names that are the same here: each name by itself."""
    return {name: name for name in names}


CLIP_KEYS = ("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c")
"""Arguments of clipped losses that may also stand directly in the section."""

ESTIMATOR_KEYS = {
    "std_level": "scale",
    "std_epsilon": "epsilon",
    "std_cal_level": "scale",
    "opmd_baseline": "baseline",
    "baseline_shift": "shift",
    "enable_step_norm": "step_norm",
    "lambda_coef": "beta",
    "fnorm": "scale",
} | _same("epsilon", "std_threshold", "rank_penalty", "tau", "shift", "gamma", "lam", "omega", "drop", "kl_coef")
"""Settings of advantage functions, and the corresponding fields of ``estimator``."""
TOP_LEVEL = ("std_level", "std_epsilon", "kl_coef")
"""Settings of advantage functions that may also stand directly in the section. Null there counts as unset."""
ESTIMATOR_VALUES = {("std_cal_level", "batch"): "batch_raw", ("fnorm", "std"): "group", ("drop", None): "none"}
CORRECTION_KEYS = {
    "clipb": {"mu": "bound"},
    "clipv": {"mu": "bound", "max_frac": "share"},
}
"""Settings of the advantage functions that also leave out tokens, and the corresponding fields of their correction."""
FIXED = {
    "duplicate_experiences": (False, "a step is not filled up with copies of groups"),
    "step_reward_key": ("step_reward", 'the reward of a step is info["step_reward"]'),
    "env_state_hash_key": ("env_state_hash", 'the state of a step is info["env_state_hash"]'),
    "temperature": (1.0, "the logprobs of teacher and student are those of their distributions"),
    "chunk_size": (None, ""),
}
"""Settings of advantage functions without a counterpart, each with its only accepted value and the reason. None: every
value is accepted and ignored."""

ADVANTAGES = _same(
    "ppo", "grpo", "rloo", "reinforceplusplus", "remax", "opmd", "asymre", "rec", "gigpo", "on_policy_distill", "jsd"
) | {
    "step_wise_grpo": "multi_step_grpo", "reinforce": "topr", "grpo_verl": "grpo", "opmd_verl": "opmd",
    "asymre_verl": "asymre", "clipb": "clip_b", "clipv": "clip_v",
    "cod": "multi_step_grpo",
}  # fmt: skip
"""Names of presets with the same estimator, by ``advantage_fn`` of Trinity-RFT."""

DOTS_KEYS = {
    "e2e_causal_returns_style": "returns",
    "e2e_causal_returns_window": "window",
    "e2e_causal_returns_gamma": "gamma",
    "red_weight_temp": "temperature",
    "red_weight_adaptive_temp": "adaptive",
    "red_weight_adaptive_level": "level",
    "red_weight_adv_shift": "center",
}
"""Settings of the advantage function ``cod``, and the corresponding fields of its estimator."""
DOTS_FIXED = {"e2e_causal_baseline": "group-mean", "red_weight_adaptive_version": "bisection"}
"""Settings of the advantage function ``cod`` that must have this value or be unset."""
DOTS_UNUSED = frozenset({"epsilon", "enable_step_norm", "std_cal_level", "std_threshold", "mask_format_issue_exp"})
"""Settings of the advantage function ``cod`` without an effect where it compares the parts of packs."""

KL_KINDS = _same("k1", "k2", "k3", "abs") | {"low_var_kl": "k3_clamped", "corrected_k3": "k3_weighted"}
"""Kinds of ``kl`` by ``kl_loss_fn`` of Trinity-RFT."""
KL_ARGUMENTS = ("kl_coef", "adaptive", "target_kl", "horizon")
"""Accepted names in ``kl_loss_fn_args``. Only ``kl_coef`` has an effect: the weight of a KL in the loss never adapts.
"""
WITHOUT_KL = frozenset({"sft", "cpt", "raft", "dapo", "asymre", "sppo", "on_policy_distill", "jsd", "dpo", "m2po"})
"""Algorithms that have no KL in the loss unless ``kl_loss_fn`` names it; all others have ``k2``."""
ENTROPY_LOSSES = ("none", "default", "mix")
"""Accepted values of ``entropy_loss_fn``. Here the bonus always applies to sampled answers alone, as with ``mix``."""


REWARD_KL_KINDS = KL_KINDS | {"corrected_k3": "k3"}
"""Kinds of ``reward_kl``, by ``kl_penalty_fn`` of Trinity-RFT. In a reward there is no ratio with which to correct k3.
"""
REWARD_KL_KEYS = {"kl_coef": "coef", "target_kl": "target", "horizon": "horizon"}
"""Fields of ``reward_kl`` by ``kl_penalty_fn_args`` except ``adaptive``."""


def take_trinity_names(user_settings: dict[str, Any], name: str, preset: Preset) -> dict[str, Any]:
    """Remove names of Trinity-RFT from ``user_settings`` and return the corresponding pieces.

    Args:
        user_settings: The section; the names are removed from it.
        name: Name of the preset.
        preset: The preset.

    Raises:
        ValueError: A name has no meaning for the algorithm, or a value is unknown.
    """
    own_rules: Sequence[Any] = (
        () if user_settings.get("policy_loss_fn") is not None else preset.loss.get("correction", ())
    )
    result = _loss(user_settings, name, preset)
    result |= _advantages(user_settings, preset, [*result.get("correction", own_rules)])
    if "loss_agg_mode" in user_settings:
        result["reduction"] = {"kind": choice("loss_agg_mode", user_settings.pop("loss_agg_mode"), REDUCTIONS)}
    result |= _kl_terms(user_settings, name, preset)
    bypass = user_settings.pop("bypass_old_logprobs", None)
    if bypass is not None:
        result["anchor"] = "mu" if bypass else "old"
    if rules := _arguments(user_settings, "rollout_correction"):
        pieces = correction_pieces(rules)
        result |= pieces | {"correction": [*result.get("correction", own_rules), *pieces["correction"]]}
    result |= _entropy(user_settings)
    return _with_whole_weights(result, user_settings, preset)


def _loss(user_settings: dict[str, Any], name: str, preset: Preset) -> dict[str, Any]:
    """Remove the policy loss and its arguments, and return their pieces."""
    named = user_settings.pop("policy_loss_fn", None)
    arguments = {key: user_settings.pop(key) for key in CLIP_KEYS if key in user_settings}
    clips = tuple(arguments)
    arguments |= _arguments(user_settings, "policy_loss_fn_args")
    base: Mapping[str, Any] = preset.loss
    function = policy_loss_of(name)
    if named is not None:
        function = choice("policy_loss_fn", named, {key: key for key in POLICY_LOSSES})
        base = POLICY_LOSSES[function].pieces
    kind = _kind_of(user_settings.get("surrogate"))
    if kind is not None and kind != _kind_of(base.get("surrogate", CLIP)):
        if clips and kind != "clip":
            raise ValueError(f"a clip range has no meaning for the surrogate {kind!r}; set the fields of surrogate")
        function = BY_SURROGATE.get(str(kind), "")
    result = dict(base) if named is not None else {}
    if any(value is not None for value in arguments.values()):
        if not function:
            raise ValueError(
                f"policy_loss_fn_args have no meaning for {name}, which is no loss of Trinity-RFT; set the fields of "
                "surrogate"
            )
        pieces = {piece: base[piece] for piece in ("surrogate", "imitation", "pair") if piece in base}
        if POLICY_LOSSES[function].has_range and kind is None:
            pieces = {"surrogate": {"kind": "clip"}} | pieces
        changes = argument_pieces(function, arguments)
        if "correction" in changes and function != "m2po":
            changes["correction"] = [*base.get("correction", ()), *changes["correction"]]
        result |= merged({key: value for key, value in pieces.items() if key in changes}, changes)
    return result


def _kind_of(piece: Any) -> Any:
    return piece.get("kind") if isinstance(piece, Mapping) else None


def _advantages(user_settings: dict[str, Any], preset: Preset, loss_rules: Sequence[Any]) -> dict[str, Any]:
    """Remove the advantage function and its arguments, and return their pieces.

    Args:
        user_settings: The section; the names are removed from it.
        preset: The preset. Its estimator is used if no advantage function is named.
        loss_rules: Corrections of the loss. The corrections of the advantage function follow them.
    """
    result: dict[str, Any] = {}
    named = user_settings.pop("advantage_fn", None)
    source = preset if named is None else PRESETS[choice("advantage_fn", named, ADVANTAGES)]
    if named is not None:
        result["estimator"] = dict(source.estimator)
    top_level = {key: user_settings.pop(key, None) for key in TOP_LEVEL}
    settings = {key: value for key, value in top_level.items() if value is not None}
    settings |= _arguments(user_settings, "advantage_fn_args")
    if named == "cod":
        result["estimator"], settings = _dots(settings, result["estimator"])
    keys = CORRECTION_KEYS.get(str(named), {})
    changes = {keys[key]: settings.pop(key) for key in list(settings) if key in keys}
    if keys:
        rules = [
            {**rule, **{key: value for key, value in changes.items() if value is not None}}
            for rule in source.loss["correction"]
        ]
        result["correction"] = [*loss_rules, *rules]
    if settings:
        base = result.get("estimator", preset.estimator)
        chosen = _estimator_settings(settings, user_settings.get("estimator", base))
        result["estimator"] = chosen if "kind" in chosen else {**base, **chosen}
    return result


def _dots(settings: Mapping[str, Any], estimator: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the estimator of the advantage function ``cod``, and the settings that are still to be translated. Without
    ``iterative_hint_e2e_causal``, ``cod`` compares runs as ``step_wise_grpo`` does.

    Args:
        settings: Settings of the advantage function.
        estimator: The estimator of ``step_wise_grpo``.
    """
    for name, only in DOTS_FIXED.items():
        if settings.get(name) not in (None, only):
            raise ValueError(f"advantage_fn_args.{name} is {settings[name]!r}, wanted {only!r}")
    names = sorted({*DOTS_KEYS, *DOTS_FIXED, "iterative_hint_e2e_causal", "mask_format_issue_exp"})
    if not settings.get("iterative_hint_e2e_causal"):
        return estimator, {name: value for name, value in settings.items() if name not in names}
    refuse_unknown("advantage_fn_args", settings.keys() - DOTS_UNUSED, names)
    fields = {DOTS_KEYS[name]: value for name, value in settings.items() if name in DOTS_KEYS and value is not None}
    if fields.get("returns") != "sliding_window_mean":
        fields.pop("window", None)  # may be -1, since it has no effect here
    return {"kind": "cod", **fields}, {}


def _entropy(user_settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the entropy loss and its arguments, and return the ``entropy_coef`` that they set."""
    named = user_settings.pop("entropy_loss_fn", None)
    if named is not None:
        choice("entropy_loss_fn", named, _same(*ENTROPY_LOSSES))
    arguments = _arguments(user_settings, "entropy_loss_fn_args")
    refuse_unknown("entropy_loss_fn_args", arguments, ("entropy_coef",))
    coef = 0.0 if named == "none" else arguments.get("entropy_coef")
    return {} if coef is None else {"entropy_coef": coef}


def _kl_terms(user_settings: dict[str, Any], name: str, preset: Preset) -> dict[str, Any]:
    """Remove the KL to a reference from ``user_settings``, and return the ``kl`` and ``reward_kl`` that it sets."""
    result: dict[str, Any] = {}
    args = _arguments(user_settings, "kl_loss_fn_args")
    refuse_unknown("kl_loss_fn_args", args, KL_ARGUMENTS)
    coef = args.get("kl_coef")
    if (kind := user_settings.pop("kl_loss_fn", None)) is not None:
        term = {"kind": choice("kl_loss_fn", kind, {"none": "", **KL_KINDS}), "coef": 0.001 if coef is None else coef}
        result["kl"] = term if kind != "none" else None
    elif coef is not None and name not in WITHOUT_KL:
        result["kl"] = {**(preset.loss.get("kl") or K2), "coef": coef}
    args = _arguments(user_settings, "kl_penalty_fn_args")
    if (kind := user_settings.pop("kl_penalty_fn", None)) is not None:
        result["reward_kl"] = None if kind == "none" else _reward_kl(kind, args)
    return result


def _with_whole_weights(result: dict[str, Any], user_settings: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Return ``result`` with the weights of KL and entropy divided by the weight of sampled answers, because
    these terms belong to sampled answers here. In Trinity-RFT they stand next to the mixture.
    """
    share = {"rl": 1.0, **preset.loss.get("weights", {}), **result.get("weights", {})}["rl"]
    if "ce_schedule" in preset.loss or "weights" in user_settings or not 0 < share < 1:
        return result
    if (term := result.get("kl")) is not None:
        result["kl"] = {**term, "coef": number_of("kl_coef", term["coef"]) / share}
    if "entropy_coef" in result:
        result["entropy_coef"] = number_of("entropy_coef", result["entropy_coef"]) / share
    return result


def _reward_kl(kind: str, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``reward_kl`` from ``kl_penalty_fn`` and its arguments, None if its weight is 0."""
    adaptive = bool(args.get("adaptive"))
    refuse_unknown("kl_penalty_fn_args", args, ("adaptive", *REWARD_KL_KEYS))
    if adaptive and None in (args.get("target_kl"), args.get("horizon")):
        raise ValueError(
            "kl_penalty_fn_args.adaptive is true without target_kl or horizon, wanted both: the KL in nats a token to "
            "hold, and the samples over which its weight changes by a fifth"
        )
    values = {name: args[key] for key, name in REWARD_KL_KEYS.items() if args.get(key) is not None}
    fields = values if adaptive else {name: value for name, value in values.items() if name == "coef"}
    term = {"kind": choice("kl_penalty_fn", kind, REWARD_KL_KINDS), "coef": 0.001, **fields}
    return term if term["coef"] else None


def _estimator_settings(settings: Mapping[str, Any], estimator: Any) -> dict[str, Any]:
    """Return settings of an advantage function as fields of the estimator. The result has a ``kind`` if it is for
    another estimator.
    """
    kind = estimator.get("kind") if isinstance(estimator, Mapping) else estimator
    result: dict[str, Any] = {}
    refuse_unknown("advantage_fn_args", settings.keys() - FIXED.keys() - {"std_normalize"}, [*ESTIMATOR_KEYS])
    for name, value in settings.items():
        if name == "std_normalize":
            result["scale"] = "population" if value else "none"
        elif name in FIXED:
            only, reason = FIXED[name]
            if only is not None and value not in (None, only):
                raise ValueError(f"advantage_fn_args.{name} is {value!r}, wanted {only!r}: {reason}")
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
    if kind == "jsd" and result.get("beta") == 0:
        # without a share of the teacher, the divergence is the reverse KL to the teacher
        result = {"kind": "distill", **{key: value for key, value in result.items() if key != "beta"}}
    return result


def _arguments(user_settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove the arguments called ``name`` from ``user_settings`` and return them.

    Raises:
        ValueError: The arguments are not a mapping of names to values.
    """
    value = user_settings.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, wanted settings by name, such as {{epsilon: 1.0e-6}}")
    return dict(value)


def move_critic_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with Trinity-RFT's critic settings moved from ``trainer`` to ``algorithm.critic``.
    Settings that ``algorithm.critic`` already has take precedence.

    Raises:
        ValueError: ``trainer.trainer_config`` contains other settings.
    """
    trainer, algorithm = data.get("trainer"), data.get("algorithm") or {}
    if not isinstance(trainer, Mapping) or not isinstance(algorithm, Mapping):
        return data
    user_critic = algorithm.get("critic") or {}
    keys = {row.old: row.new.removeprefix(CRITIC) for row in trinity_names() if row.new.startswith(CRITIC)}
    flat = _flat({key: trainer[key] for key in ("critic_warmup", "trainer_config") if trainer.get(key) is not None})
    if unknown := {f"trainer.{key}" for key in flat} - keys.keys():
        valid = ", ".join(key.removeprefix(CONFIG) for key in keys if key.startswith(CONFIG))
        raise ValueError(
            f"{min(unknown)} is not supported: of trainer_config only {valid} are read; remove it "
            "(docs/settings.md lists the settings of trinity-mq)"
        )
    critic = {keys[f"trainer.{key}"]: value for key, value in flat.items()}
    critic = critic | dict(user_critic) if isinstance(user_critic, Mapping) else user_critic
    remaining = {key: value for key, value in trainer.items() if key not in {"critic_warmup", "trainer_config"}}
    return data | {"trainer": remaining} | ({"algorithm": {**algorithm, "critic": critic}} if critic else {})


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their dotted keys."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result
