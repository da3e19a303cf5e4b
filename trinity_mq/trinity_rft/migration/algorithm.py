"""Rules of the table of names for the algorithm: its losses, its optimizer and the replay of experiences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.algorithm.checks import AGAINST_SAMPLER, BY_TOKEN
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.resolve import canonical_name
from trinity_mq.config.algorithm.rollout_correction import correction_pieces
from trinity_mq.config.algorithm.translate import ADVANTAGES, ENTROPY_LOSSES, KL_KINDS
from trinity_mq.config.algorithm.trinity_losses import POLICY_LOSSES, SIZES
from trinity_mq.trinity_rft.migration.transfer import (
    SettingsTransfer,
    number,
    resolve_environment,
    whole,
)

SECTION = "algorithm."


class TrinityAlgorithm(NamedTuple):
    """An ``algorithm_type`` of Trinity-RFT 0.6: the functions that it names, and the runs of a task."""

    advantage_fn: str
    """Empty: the algorithm does not use advantages."""
    policy_loss_fn: str
    kl_loss_fn: str = "k2"
    entropy_loss_fn: str = "default"
    repeat_times: int = 2
    in_trainer: bool = False
    """Whether the trainer computes the advantages; only then do rewards contain a KL term."""


ALGORITHMS = {
    "sft": TrinityAlgorithm("", "sft", "none", "none", 1),
    "cpt": TrinityAlgorithm("", "sft", "none", "none", 1),
    "raft": TrinityAlgorithm("", "sft", "none", "none", 1),
    "dpo": TrinityAlgorithm("", "dpo", "none", "none"),
    "ppo": TrinityAlgorithm("ppo", "ppo", repeat_times=1, in_trainer=True),
    "grpo": TrinityAlgorithm("grpo", "ppo"),
    "grpo_verl": TrinityAlgorithm("grpo", "ppo", in_trainer=True),
    "dapo": TrinityAlgorithm("grpo", "ppo", "none", repeat_times=16),
    "reinforceplusplus": TrinityAlgorithm("reinforceplusplus", "ppo", in_trainer=True),
    "rloo": TrinityAlgorithm("rloo", "ppo", in_trainer=True),
    "opmd": TrinityAlgorithm("opmd", "opmd"),
    "asymre": TrinityAlgorithm("asymre", "opmd", "none", "none"),
    "topr": TrinityAlgorithm("reinforce", "topr"),
    "cispo": TrinityAlgorithm("grpo", "cispo"),
    "gspo": TrinityAlgorithm("grpo", "gspo"),
    "sapo": TrinityAlgorithm("grpo", "sapo"),
    "mix": TrinityAlgorithm("grpo", "mix", entropy_loss_fn="mix", repeat_times=8),
    "mix_chord": TrinityAlgorithm("grpo", "mix_chord", entropy_loss_fn="mix", repeat_times=8),
    "sppo": TrinityAlgorithm("opmd", "sppo", "none", "none"),
    "rec": TrinityAlgorithm("rec", "rec"),
    "multi_step_grpo": TrinityAlgorithm("step_wise_grpo", "ppo", repeat_times=8),
    "gigpo": TrinityAlgorithm("gigpo", "ppo", repeat_times=8),
    "on_policy_distill": TrinityAlgorithm("on_policy_distill", "ppo", "none", "none", 8, in_trainer=True),
    "jsd": TrinityAlgorithm("jsd", "ppo", "none", "none", 8, in_trainer=True),
    "m2po": TrinityAlgorithm("grpo", "m2po", "none", "none"),
}
"""Trinity-RFT's algorithms by name, and ``m2po``, which its main branch adds."""
_TOKENS = {"loss_agg_mode": "token-mean"}
POLICY_LOSS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"clip_range": 0.2, "clip_ratio_c": 3.0, **_TOKENS},
    "gspo": {"clip_range_low": 0.0003, "clip_range_high": 0.0004, "loss_agg_mode": "seq-mean-token-mean"},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, **_TOKENS},
    "cispo": {"clip_range_low": 1.0, "clip_range_high": 0.28, **_TOKENS},
    "topr": {"advantage_threshold": 0.0, **_TOKENS},
    "sppo": {"epsilon": 0.3, **_TOKENS},
    "opmd": {"tau": 1.0, **_TOKENS},
    "rec": {
        "epsilon_low": 0.2, "epsilon_high": 0.2, "epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0,
        "clip_mode": "none", "weight": "none", "regularizer": "none", "temp": 1.0,
    },
    "importance_sampling": _TOKENS,
    "m2po": {"m2_threshold": 0.04, **_TOKENS},
    "sft": _TOKENS,
    "sft_is": _TOKENS,
    "sft_phi": {"cutoff_prob": 1.0, **_TOKENS},
    "mix": {"mu": 0.1, "clip_range": 0.2, **_TOKENS},
    "mix_chord": {
        "mu_warmup_steps": 0, "mu_decay_steps": 0, "mu_peak": 0.1, "mu_valley": 0.1, "enable_phi_function": True,
        "clip_range": 0.2, **_TOKENS,
    },
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
}  # fmt: skip
"""Arguments that Trinity-RFT gives to a policy loss if the configuration does not set any."""
ADVANTAGE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"gamma": 1.0, "lam": 1.0},
    "grpo": {"epsilon": 1e-6, "std_threshold": None, "rank_penalty": None, "std_cal_level": "group"},
    "grpo_verl": {"epsilon": 1e-6},
    "step_wise_grpo": {"epsilon": 1e-6, "enable_step_norm": False, "std_threshold": None, "std_cal_level": "group"},
    "gigpo": {"omega": 1.0, "gamma": 1.0, "fnorm": "none", "epsilon": 1e-6},
    "reinforceplusplus": {"gamma": 1.0},
    "opmd": {"opmd_baseline": "mean", "tau": 1.0},
    "opmd_verl": {"opmd_baseline": "mean", "tau": 1.0},
    "asymre": {"baseline_shift": -0.1},
    "asymre_verl": {"baseline_shift": -0.1},
    "rec": {"epsilon": 1e-6, "std_normalize": False, "drop": None},
    "on_policy_distill": {"kl_coef": 1.0},
    "jsd": {"lambda_coef": 0.5, "kl_coef": 1.0},
    "clipb": {"epsilon": 1e-6, "mu": 2.5},
    "clipv": {"epsilon": 1e-6, "mu": 8.5, "max_frac": 1e-4},
}
"""Arguments that Trinity-RFT gives to an advantage function if the configuration does not set any."""
PARTIAL: Mapping[str, Mapping[str, Any]] = {
    "rec": {"epsilon_low_prime": 0.4, "epsilon_high_prime": 0.4},
    "clipv": {"mu": 2.0},
}
"""Defaults that differ if a configuration sets some arguments of a function: Trinity-RFT then takes the defaults of the
class instead of ``default_args``.
"""
DIFFERENCES = {
    "dpo": "each pair has a logit of its own, where Trinity-RFT has one for a micro-batch",
    "sapo": "the gradient flows through the gate, as in the paper, where Trinity-RFT holds the gate constant",
    "jsd": "the advantage is the gradient of the divergence, where Trinity-RFT's is the same for student and teacher",
    "ppo": "GAE skips tokens that are not trained, where Trinity-RFT counts them in",
    "gigpo": "the states of different tasks are not compared, where Trinity-RFT compares all states of a batch",
    "mix": "a KL and the entropy are those of sampled answers, where Trinity-RFT's KL has expert answers too",
    "mix_chord": (
        "a KL and the entropy are those of sampled answers and weigh with them by 1 - mu, where Trinity-RFT's KL has "
        "expert answers too and stands beside the mixture"
    ),
}
"""Intended differences of an algorithm from Trinity-RFT."""
WITHOUT_GROUPS = frozenset({"", "ppo", "reinforceplusplus", "reinforce", "on_policy_distill", "jsd"})
"""Advantage functions that do not compare the runs of a task."""
STRATEGIES = {"step_wise_grpo": "multi_step_grpo"}
"""Algorithms by ``add_strategy``, a key of Trinity-RFT 0.3."""
LEARNING_RATE = 1e-6
"""Trinity-RFT's default of ``optimizer.lr``."""
NAMES = (
    "advantage_fn", "advantage_fn_args", "policy_loss_fn", "policy_loss_fn_args", "kl_penalty_fn",
    "kl_penalty_fn_args", "kl_loss_fn", "kl_loss_fn_args", "entropy_loss_fn", "entropy_loss_fn_args", "loss_agg_mode",
    "bypass_old_logprobs", "rollout_correction",
)  # fmt: skip
"""Keys of the losses, in their order in a file."""
NEEDED_BY = {
    "outer_low": ("keep", "ring"),
    "outer_high": ("keep", "ring"),
    "temperature": ("weight", "advantage"),
    "threshold": ("only", "negative"),
}
"""Fields of a piece that have an effect only if another field has a certain value: (name of the other field, value)."""
FUNCTIONS = {
    "advantage_fn": frozenset(ADVANTAGES),
    "policy_loss_fn": frozenset(POLICY_LOSSES),
    "kl_loss_fn": frozenset({"none", *KL_KINDS}),
    "entropy_loss_fn": frozenset(ENTROPY_LOSSES),
}
"""Names of Trinity-RFT's functions by their key. Any other name is a plug-in."""
PIECES_OF = {
    "advantage_fn": ("estimator",),
    "policy_loss_fn": tuple(name for name in LossConfig.model_fields if name != "kl"),
    "kl_loss_fn": ("kl",),
    "entropy_loss_fn": ("entropy_coef",),
}
"""Pieces that belong to a function, by its key."""
VERL_CORRECTION = "trainer.trainer_config.algorithm.rollout_correction"


def algorithm_type(move: SettingsTransfer) -> str:
    """Return the ``algorithm_type`` of the new configuration, with its environment variables filled in."""
    return str(resolve_environment(move.settings["algorithm"]["algorithm_type"]))


def losses(move: SettingsTransfer) -> None:
    """Move the algorithm and its losses. Defaults of Trinity-RFT that differ from the defaults here are written as
    pieces.
    """
    if (renamed := STRATEGIES.get(strategy := str(move.resolved(SECTION + "add_strategy")))) is not None:
        move.take(SECTION + "add_strategy")
        move.take(SECTION + "algorithm_type")
        move.put(SECTION + "algorithm_type", renamed, f"was algorithm.add_strategy {strategy}")
    move.keep_or_default(SECTION + "algorithm_type", "ppo", "Trinity-RFT's default; here it is grpo")
    kind = algorithm_type(move)
    if kind in DIFFERENCES:
        move.put(SECTION + "algorithm_type", move.settings["algorithm"]["algorithm_type"], DIFFERENCES[kind])
    algorithm = ALGORITHMS.get(kind)
    _leave_out_sizes(move)
    _kl(move, kind, algorithm)
    _correction(move)
    _repeat_times(move, algorithm)
    _samples(move, algorithm)
    kept = {name: value for name in NAMES if (value := move.take(SECTION + name)) is not None}
    entropy = resolve_environment(kept.get("entropy_loss_fn", algorithm.entropy_loss_fn if algorithm else None))
    if entropy in ENTROPY_LOSSES:
        kept.pop("entropy_loss_fn", None)
    if entropy == "none" and kept.pop("entropy_loss_fn_args", None) is not None:
        move.put(SECTION + "entropy_coef", 0.0, "was algorithm.entropy_loss_fn: none")
    for name, value in kept.items():
        move.put(SECTION + name, value)
    if algorithm is not None and move.resolved("mode", "both") in ("both", "train", "explore"):
        _defaults(move, kind, algorithm, kept)


def _leave_out_sizes(move: SettingsTransfer) -> None:
    """Leave out arguments without an effect on a loss here."""
    for name in SIZES:
        move.leave_out(
            f"{SECTION}policy_loss_fn_args.{name}",
            "it follows from `buffer` and `buffer.trainer_input.expert_data_ratio`",
            matters=False,
        )
    for section in ("kl_loss_fn_args", "entropy_loss_fn_args"):
        for name in SIZES:
            move.leave_out(f"{SECTION}{section}.{name}", "a step has the counts of all its tokens", matters=False)
    copies = SECTION + "advantage_fn_args.duplicate_experiences"
    reason = "a step has fewer groups instead of copies of groups; the loss is a mean, so that copies add only noise"
    move.leave_out(copies, reason, matters=bool(move.resolved(copies)))
    for name in ("advantage_fn_args", "policy_loss_fn_args", "kl_loss_fn_args", "entropy_loss_fn_args"):
        if move.peek(SECTION + name) == {}:
            move.take(SECTION + name)


def _kl(move: SettingsTransfer, kind: str, algorithm: TrinityAlgorithm | None) -> None:
    """Remove KL terms that have no counterpart or no effect here: the KL loss of dpo, the KL loss k1, and a KL in the
    rewards that is off or that Trinity-RFT ignores for the algorithm.
    """
    name, coef = move.resolved(SECTION + "kl_loss_fn"), number(move.peek(SECTION + "kl_loss_fn_args.kl_coef"))
    if kind == "dpo" or name == "k1":
        if coef != 0 and name != "none":
            reason = (
                "as a loss k1 has an expected gradient of 0 on sampled answers, and on recorded ones it lowers the "
                "likelihood of all; k2 and k3 hold the policy near its reference, and dpo does so itself"
                if name == "k1"
                else "the loss of dpo itself holds the policy near its reference, without a term beside it"
            )
            value = move.peek(SECTION + "kl_loss_fn", "k2")
            move.lost(SECTION + "kl_loss_fn", value, reason, matters=name is not None)
        move.take(SECTION + "kl_loss_fn")
        move.take(SECTION + "kl_loss_fn_args")
        if name == "k1":
            move.put(
                SECTION + "kl_loss_fn", "none", "was k1, which only adds noise; k2 holds the policy near a reference"
            )
    penalty = move.resolved(SECTION + "kl_penalty_fn", "none")
    if penalty == "none" or number(move.peek(SECTION + "kl_penalty_fn_args.kl_coef")) == 0:
        move.take(SECTION + "kl_penalty_fn")
        move.take(SECTION + "kl_penalty_fn_args")
    elif algorithm is not None and not algorithm.in_trainer:
        reason = (
            f"Trinity-RFT has a KL in the rewards of algorithms whose trainer computes advantages, and {kind} is none"
        )
        move.leave_out(SECTION + "kl_penalty_fn", reason, matters=False)
        move.leave_out(SECTION + "kl_penalty_fn_args", reason, matters=False)


def _correction(move: SettingsTransfer) -> None:
    """Move ``rollout_correction``, also from veRL's configuration, if it can be used here; otherwise record it as left
    out. Drop ``bypass_old_logprobs`` if it is true, which is its default.
    """
    if isinstance(rules := move.take(VERL_CORRECTION), Mapping) and move.peek(SECTION + "rollout_correction") is None:
        move.put(SECTION + "rollout_correction", dict(rules), f"was {VERL_CORRECTION}")
    rules = move.take(SECTION + "rollout_correction", move.settings["algorithm"].get("rollout_correction"))
    if move.resolved(SECTION + "bypass_old_logprobs", True):
        move.take(SECTION + "bypass_old_logprobs")
    if rules is None:
        return
    move.settings["algorithm"].pop("rollout_correction", None)
    if not isinstance(rules, Mapping):
        move.lost(SECTION + "rollout_correction", rules, "wanted settings by name")
        return
    try:
        correction_pieces(_resolved(rules))
    except ValueError as error:
        move.lost(SECTION + "rollout_correction", dict(rules), str(error))
        return
    move.put(
        SECTION + "rollout_correction", dict(rules),
        "it takes effect here; Trinity-RFT 0.6 reads it without effect, except with trainer_type verl_legacy",
    )  # fmt: skip


def _repeat_times(move: SettingsTransfer, algorithm: TrinityAlgorithm | None) -> None:
    """Write the number of runs of a task if ``repeat_times`` is missing. Leave the key out in mode train."""
    if move.resolved("mode") == "train":
        move.leave_out(SECTION + "repeat_times", "mode train rolls nothing out", matters=False)
    elif move.peek(SECTION + "repeat_times") is None and algorithm is not None:
        compares = algorithm.advantage_fn not in WITHOUT_GROUPS
        comment = "Trinity-RFT's default" + (
            " of the algorithm; its 0.6 runs a task once without this key, and runs cannot be compared then"
            if compares
            else ""
        )
        move.put(SECTION + "repeat_times", max(2, algorithm.repeat_times) if compares else 1, comment)


def _samples(move: SettingsTransfer, algorithm: TrinityAlgorithm | None) -> None:
    """Write the share of expert answers if experts are mixed in and the share is missing. Leave out the name of their
    only source.
    """
    there = SECTION + "sample_strategy_args."
    reason = "expert answers have one source, `buffer.trainer_input.auxiliary_buffers`"
    move.leave_out(there + "sft_dataset_name", reason, matters=False)
    mixes = algorithm is not None and algorithm.policy_loss_fn in {"mix", "mix_chord"}
    strategy = move.resolved(SECTION + "sample_strategy", "mix" if mixes else "default")
    if strategy == "mix" and move.peek(there + "expert_data_ratio") is None:
        move.put("buffer.trainer_input.expert_data_ratio", 0.5, "Trinity-RFT's default; here it is 0.2")


def _defaults(move: SettingsTransfer, kind: str, algorithm: TrinityAlgorithm, kept: Mapping[str, Any]) -> None:
    """Write Trinity-RFT's defaults as pieces where the defaults here differ, with comments on other differences. Add a
    weight for old data to a loss with recomputed logprobs, and leave out a KL in the rewards that the estimator cannot
    use. Do nothing if the settings are not valid.
    """
    written = {name: value for name, value in _resolved(move.settings["algorithm"]).items() if name != "optimizer"}
    written |= {"algorithm_type": kind, "repeat_times": 16}
    foreign = {name for name, names in FUNCTIONS.items() if name in written and not _is_known(written[name], names)}
    written = {name: value for name, value in written.items() if name.removesuffix("_args") not in foreign}
    try:
        here = AlgorithmConfig.model_validate(written)
        there = AlgorithmConfig.model_validate(written | trinity_defaults(algorithm, written))
    except ValidationError:
        return  # the user reads the error when the result is checked
    foreign_pieces = {piece for name in foreign for piece in PIECES_OF[name]}
    for place, value, old in differences(here, there):
        if place.partition(".")[0] in foreign_pieces:
            continue
        move.put(SECTION + place, value, f"Trinity-RFT's default; here it is {_words(old)}")
    _comment_differences(move, there, kept)
    weighs = any(rule.kind in AGAINST_SAMPLER for rule in there.correction)
    if there.anchor == "old" and not weighs and not _is_fresh(move):
        rules = [_written(rule) for rule in there.correction]
        move.put(
            SECTION + "correction", [*rules, {"kind": "weight"}],
            "Trinity-RFT has no weight between the sampler and recomputed logprobs, so that old data counts as fresh",
        )  # fmt: skip
    if there.reward_kl is not None and there.estimator.kind not in BY_TOKEN:
        penalty = move.settings["algorithm"].pop("kl_penalty_fn")
        move.settings["algorithm"].pop("kl_penalty_fn_args", None)
        reason = f"the rewards of tokens have no part in {kind}; take kl_loss_fn: k2"
        move.lost(SECTION + "kl_penalty_fn", penalty, reason)


def _is_known(name: Any, names: frozenset[str]) -> bool:
    return isinstance(name, str) and name in names


def _comment_differences(move: SettingsTransfer, there: AlgorithmConfig, kept: Mapping[str, Any]) -> None:
    """Comment on values whose meaning in Trinity-RFT differs from the meaning of their names."""
    loss_args = kept.get("policy_loss_fn_args") or {}
    if "loss_agg_mode" in kept and loss_args and "loss_agg_mode" not in loss_args:
        move.put(
            SECTION + "loss_agg_mode", kept["loss_agg_mode"],
            "of the whole loss; Trinity-RFT 0.6 reduces only KL and entropy so, and its policy loss by token, if "
            "policy_loss_fn_args lacks loss_agg_mode",
        )  # fmt: skip
    elif "loss_agg_mode" not in kept and there.reduction.kind != "token":
        where = f"{SECTION}policy_loss_fn_args" if loss_args.get("loss_agg_mode") else f"{SECTION}algorithm_type"
        value = loss_args if loss_args.get("loss_agg_mode") else move.settings["algorithm"]["algorithm_type"]
        move.put(
            where, value,
            "the reduction is that of the whole loss; Trinity-RFT 0.6 reduces by token where algorithm.loss_agg_mode "
            "is missing",
        )  # fmt: skip
    if there.kl is not None and there.kl.coef and there.weights.rl < 1 and move.has(SECTION + "kl"):
        move.put(
            SECTION + "kl", move.settings["algorithm"]["kl"],
            f"{there.kl.coef * there.weights.rl:g} beside the mixture there; here a part of the sampled answers, which "
            f"weigh {there.weights.rl:g}",
        )  # fmt: skip


def trinity_defaults(algorithm: TrinityAlgorithm, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm section of Trinity-RFT with its defaults filled in, without the keys that the migration does
    not change.

    Args:
        algorithm: The ``algorithm_type``.
        section: The keys of :data:`NAMES` that the configuration has, environment variables filled in.
    """
    advantage = section.get("advantage_fn", algorithm.advantage_fn)
    loss = section.get("policy_loss_fn", algorithm.policy_loss_fn)
    result: dict[str, Any] = {"policy_loss_fn": loss}
    if algorithm.advantage_fn:
        result |= {"advantage_fn": advantage}
        result["advantage_fn_args"] = _arguments(advantage, ADVANTAGE_DEFAULTS, section.get("advantage_fn_args"))
    result["policy_loss_fn_args"] = _arguments(loss, POLICY_LOSS_DEFAULTS, section.get("policy_loss_fn_args"))
    kl = section.get("kl_loss_fn", algorithm.kl_loss_fn)
    return result | {"kl_loss_fn": kl, "kl_loss_fn_args": {"kl_coef": 0.001, **(section.get("kl_loss_fn_args") or {})}}


def _arguments(name: str, defaults: Mapping[str, Mapping[str, Any]], section: Any) -> dict[str, Any]:
    values = {key: value for key, value in (section or {}).items() if value is not None}
    return {**defaults.get(name, {}), **(PARTIAL.get(name, {}) if values else {}), **values}


def _resolved(value: Any) -> Any:
    """Return settings with their environment variables filled in."""
    if isinstance(value, Mapping):
        return {key: _resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner) for inner in value]
    return resolve_environment(value)


def differences(here: AlgorithmConfig, there: AlgorithmConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield place, value there and value here of each setting of the pieces that differs."""
    for name in AlgorithmConfig.model_fields:
        mine, other = getattr(here, name), getattr(there, name)
        if mine == other or name in {"algorithm_type", "repeat_times", "optimizer"}:
            continue
        if isinstance(mine, BaseModel) and type(mine) is type(other):
            for field in type(mine).model_fields:
                needed = NEEDED_BY.get(field, ("kind", getattr(other, "kind", None)))
                has_effect = getattr(other, needed[0], None) == needed[1]
                if has_effect and (old := getattr(mine, field)) != (new := getattr(other, field)):
                    yield f"{name}.{field}", new, old
        elif isinstance(other, BaseModel):
            yield name, _written(other), mine
        else:
            yield name, [_written(rule) for rule in other] if isinstance(other, tuple) else other, mine


def _written(piece: BaseModel) -> dict[str, Any]:
    """Return a piece in the form of a configuration file."""
    shown = {name for name in ("kind", "coef") if hasattr(piece, name)}
    return piece.model_dump(mode="json", include=shown) | piece.model_dump(mode="json", exclude_defaults=True)


def _words(value: Any) -> str:
    if isinstance(value, BaseModel):
        return str(getattr(value, "kind", "set"))
    if isinstance(value, tuple):
        return ", ".join(_words(item) for item in value) or "none"
    return "none" if value is None else str(value)


def _is_fresh(move: SettingsTransfer) -> bool:
    """Return whether every batch is sampled by the weights of its train step."""
    fixed = move.resolved("synchronizer.sync_style", "fixed") == "fixed"
    interval, offset = move.peek("synchronizer.sync_interval", 1), move.peek("synchronizer.sync_offset", 0)
    return fixed and whole(interval) == 1 and whole(offset) == 0 and move.resolved("mode", "both") == "both"


def optimizer(move: SettingsTransfer) -> None:
    """Move the optimizer and the schedule of its learning rate."""
    section = "algorithm.optimizer."
    preset = PRESETS.get(canonical_name(algorithm_type(move)))
    rates = (section + "lr", "trainer.trainer_config.actor_rollout_ref.actor.optim.lr")
    if preset is not None and preset.lr != LEARNING_RATE and all(move.peek(key) is None for key in rates):
        move.put(section + "lr", LEARNING_RATE, f"Trinity-RFT's default; here it is {preset.lr:g}")
    if move.peek("trainer.grad_clip") is not None:
        move.leave_out(section + "clip_grad", "trainer.grad_clip decides", matters=False)
    style, scheduler = move.take(section + "warmup_style"), move.take(section + "lr_scheduler_type")
    if style is not None:
        move.put(section + "lr_scheduler_type", style, "was algorithm.optimizer.warmup_style")
    elif scheduler is not None:
        move.put(section + "lr_scheduler_type", scheduler)
    else:
        comment = "Trinity-RFT's default; here it is linear, which falls"
        move.put(section + "lr_scheduler_type", "constant", comment)
    steps = whole(move.peek("trainer.total_steps")) or whole(move.peek("buffer.total_steps"))
    ratio = number(move.take(section + "lr_warmup_steps_ratio")) or 0.0
    warmup = move.take(section + "lr_warmup_steps")
    if warmup is not None and (whole(warmup) or 0) >= 0:
        move.put(section + "lr_warmup_steps", warmup)
    elif math.isfinite(ratio) and ratio and steps:
        comment = f"was lr_warmup_steps_ratio {ratio:g}, of {steps} steps"
        move.put(section + "lr_warmup_steps", int(ratio * steps), comment)
    else:
        share = (
            f"was lr_warmup_steps_ratio {ratio:g}; give that share of the run's train steps, which follow from the "
            "size of the data"
        )
        move.put(section + "lr_warmup_steps", 0, share if ratio else "Trinity-RFT's default; here it is 10")
    if move.settings["algorithm"]["optimizer"]["lr_scheduler_type"] == "constant":
        move.take(section + "min_lr_ratio")  # a constant learning rate has no decay
    else:
        move.keep_or_default(section + "min_lr_ratio", 0.01, "Trinity-RFT's default; here it is 0.1")
    move.keep_or_default(section + "betas", [0.9, 0.999], "Trinity-RFT's default, which is another here")
    move.keep_or_default(section + "weight_decay", 0.01, "Trinity-RFT's default, which is another here")


REPLAY = "buffer.trainer_input.replay."
REPLAY_BUFFER = "buffer.trainer_input.experience_buffer.replay_buffer"
PRIORITIES = {"linear_decay": 0, "decay_limit_randomization": 3}
"""Default of ``use_count_limit`` by ``priority_fn``; 0: no limit."""
UNLIMITED = 1_000_000
"""Value of ``max_uses`` that stands for no limit. ``max_age`` ends the uses of a group much earlier."""


def replay(move: SettingsTransfer, replay_buffer: Mapping[str, Any]) -> None:
    """Move an enabled priority queue to the section ``replay``. In Trinity-RFT it returns used experiences after
    ``reuse_cooldown_time`` seconds, if no experience of a higher priority is there. A queue that returns no experience
    again is recorded as left out. A ``priority_fn`` that is not in :data:`PRIORITIES` is a class of the user and keeps
    its name.
    """
    if not resolve_environment(replay_buffer.get("enable")):
        return
    old = move.item(replay_buffer, (), REPLAY_BUFFER)
    arguments = old.take_mapping("priority_fn_args")
    priority = str(old.resolved("priority_fn", "linear_decay"))
    pause = number(old.peek("reuse_cooldown_time"))
    if pause is None:
        reason = (
            "without reuse_cooldown_time no experience is trained on again; the queue only prefers new experiences, "
            "and here a step has them in the order of arrival"
        )
        move.lost(REPLAY_BUFFER, dict(replay_buffer), reason)
        return
    is_own = priority not in PRIORITIES
    limit = 0 if is_own else whole(arguments.get("use_count_limit", PRIORITIES[priority])) or 0
    if limit == 1:
        reason = "use_count_limit 1 has every experience once, so that none is replayed"
        move.lost(REPLAY_BUFFER, dict(replay_buffer), reason, matters=False)
        return
    move.put(
        REPLAY + "share", 0.5,
        "was replay_buffer.enable: half of a step; Trinity-RFT's depends on how fast rollouts come. `max_age` bounds "
        "the age of a group, which Trinity-RFT does not",
    )  # fmt: skip
    if is_own:
        move.put(
            REPLAY + "priority_fn", priority, "was replay_buffer.priority_fn", origin=f"{REPLAY_BUFFER}.priority_fn"
        )
        if arguments:
            move.put(REPLAY + "priority_fn_args", dict(arguments), origin=f"{REPLAY_BUFFER}.priority_fn_args")
    else:
        for name in ("decay", "sigma"):
            if (value := arguments.get(name)) is not None:
                move.put(REPLAY + name, value, f"was replay_buffer.priority_fn_args.{name}")
    uses = f"was use_count_limit {limit}, with the first use" if limit > 0 else f"{priority} has no limit of uses"
    uses = f"{priority} decides how often a group is used" if is_own else uses
    move.put(REPLAY + "max_uses", limit - 1 if limit > 0 else UNLIMITED, uses)
    move.put(REPLAY + "cooldown", 1, f"in train steps; was reuse_cooldown_time {pause:g} s")
