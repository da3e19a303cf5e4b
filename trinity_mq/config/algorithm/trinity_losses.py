"""Policy losses of Trinity-RFT: their pieces here, and the meaning of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.config.algorithm.presets import CLIP, PRESETS

REDUCTIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""Kinds of ``reduction`` by ``loss_agg_mode`` of Trinity-RFT."""

CLIP_MODES = {
    "none": "all",
    "one-side": "one_side",
    "gspo-one-side": "one_side",
    "two-side": "two_side",
    "ring": "ring",
}
"""Values of ``surrogate.keep`` by ``clip_mode`` of the loss ``rec``."""
WEIGHTS = {
    "none": "none",
    "importance_sampling": "ratio",
    "gspo_importance_sampling": "ratio",
    "advantage": "advantage",
}
"""Values of ``surrogate.weight`` by ``weight`` of the loss ``rec``."""
REC_REGULARISERS = {"k2": "square", "forward-kl": "likelihood"}
"""Kinds of ``regularisers`` by ``regularizer`` of the loss ``rec``."""
SIZES = (
    "train_batch_size_expert", "train_batch_size_usual", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu",
    "ngpus_trainer", "use_dynamic_bsz", "read_batch_size_expert", "read_batch_size_usual", "repeat_times",
)  # fmt: skip
"""Arguments of ``mix`` and ``mix_chord`` that weight micro-batches. They have no effect here, since each part of the
loss is the mean over its own tokens of the whole optimizer step."""

Arguments = dict[str, Any]
Pieces = dict[str, Any]


def number_of(name: str, value: Any) -> float:
    """Return an argument as a number; YAML 1.1 reads ``1e-6`` as a text.

    Raises:
        ValueError: The argument is not a number.
    """
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} is {value!r}, wanted a number")


REGISTERED = frozenset({"policy_loss_fn", "advantage_fn", "kl_loss_fn", "entropy_loss_fn"})
"""Settings that may also name a class of the user's own."""
OF_PLUGINS = "a name that a module in plugin_dirs registers"


def choice(name: str, value: Any, table: Mapping[str, str]) -> str:
    """Return the entry of ``table`` for a value.

    Raises:
        ValueError: The table has no such entry.
    """
    if isinstance(value, dict | list) or value not in table:
        end = f", or {OF_PLUGINS}" if name in REGISTERED else ""
        raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(table)}{end}")
    return table[value]


def refuse_unknown(section: str, names: Iterable[str], accepted: Sequence[str], of: str = "") -> None:
    """Refuse arguments that are not known.

    Raises:
        ValueError: An argument is unknown; the message names the first.
    """
    if unknown := sorted(set(names) - set(accepted), key=str):
        raise ValueError(f"{section}.{unknown[0]} is not known{of}, wanted one of {', '.join(accepted) or 'none'}")


def merged_piece(below: Any, above: Any) -> Any:
    """Return ``above`` merged over ``below``: field by field if both are pieces of one kind, otherwise ``above``."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    is_same = above.get("kind", below.get("kind")) == below.get("kind")
    return {**below, **above} if is_same else above


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Pieces:
    """Return ``below`` with the pieces of ``above``."""
    return {**below, **{name: merged_piece(below.get(name), piece) for name, piece in above.items()}}


def _taken(arguments: Arguments, name: str, default: float | None = None) -> float | None:
    """Remove an argument and return it as a number, ``default`` if it is missing."""
    value = arguments.pop(name, None)
    return default if value is None else number_of(name, value)


def _rec(arguments: Arguments) -> Pieces:
    """Return the pieces of the loss ``rec`` (arXiv 2509.24203): mode and weight, and the regulariser."""
    pieces: Pieces = {"surrogate": {}}
    mode, weight = arguments.pop("clip_mode", None), arguments.pop("weight", None)
    if mode is not None:
        pieces["surrogate"]["keep"] = choice("policy_loss_fn_args.clip_mode", mode, CLIP_MODES)
    if weight is not None:
        pieces["surrogate"]["weight"] = choice("policy_loss_fn_args.weight", weight, WEIGHTS)
    if mode == "gspo-one-side":
        arguments.pop("loss_agg_mode", None)
        pieces |= {"ratio": {"kind": "sequence"}, "reduction": {"kind": "sequence"}}
        if weight == "importance_sampling":
            raise ValueError(
                "policy_loss_fn_args.weight is importance_sampling with clip_mode gspo-one-side: the range has the "
                "ratio of the sequence and the weight that of the token, wanted one ratio for both, "
                "gspo_importance_sampling"
            )
    elif weight == "gspo_importance_sampling":
        raise ValueError(
            f"policy_loss_fn_args.weight is gspo_importance_sampling with clip_mode {mode}, wanted gspo-one-side: only "
            "that mode has the ratio of the sequence"
        )
    terms: list[Pieces] = []
    if arguments.pop("fix_opd_advantage", False):
        if mode not in {None, "none"} or weight not in {None, "none"}:
            raise ValueError(
                f"policy_loss_fn_args.fix_opd_advantage is true with clip_mode {mode} and weight {weight}, wanted none "
                "and none: only then its gradient is that of a square of the log ratio"
            )
        # log mu - log pi, added to an advantage, has the gradient of (log pi - log mu)^2 / 2
        terms.append({"kind": "square", "coef": 0.5})
    regulariser, coef = arguments.pop("regularizer", None), _taken(arguments, "regularizer_coef")
    if regulariser is not None and regulariser != "none":
        kind = choice("policy_loss_fn_args.regularizer", regulariser, {"none": "", **REC_REGULARISERS})
        if coef:
            terms.append({"kind": kind, "coef": coef})
    return pieces | ({"regularisers": terms} if terms else {})


def _opmd(arguments: Arguments) -> Pieces:
    """Return the pieces of ``-A log pi / (1 + tau)`` (arXiv 2505.17826)."""
    tau = _taken(arguments, "tau")
    return {} if tau is None else {"surrogate": {"divisor": 1 + tau}}


def _cispo(arguments: Arguments) -> Pieces:
    """Return the bounds of the weight, ``1 - low`` and ``1 + high`` (arXiv 2506.13585), and of the mask."""
    surrogate: Pieces = {}
    if (low := _taken(arguments, "clip_range_low")) is not None:
        surrogate["floor"] = max(0.0, 1 - low)
    if (high := _taken(arguments, "clip_range_high")) is not None:
        surrogate["cap"] = 1 + high
    has_mask = arguments.pop("enable_mask_clip", False)
    low, high = _taken(arguments, "mask_clip_range_low"), _taken(arguments, "mask_clip_range_high", 0.28)
    if has_mask:
        is_bound = low is not None and low < 1  # a ratio is never below 0
        surrogate |= {"mask_low": low if is_bound else None, "mask_high": high}
    return {"surrogate": surrogate}


def _ppo(arguments: Arguments) -> Pieces:
    """Return the pieces of a gradient without a ratio, or of the sequence mask (arXiv 2512.02556), if requested."""
    masks, bound = arguments.pop("enable_sequence_masking", False), _taken(arguments, "delta_sequence_masking", 0.1)
    if arguments.pop("fallback_to_policy_gradient", False):
        return {"ratio": {"kind": "self"}}  # a ratio of 1 has no divergence to mask
    return {"correction": [{"kind": "sequence_mask", "bound": bound, "against": "anchor"}]} if masks else {}


def _mixed_reductions(arguments: Arguments) -> Pieces:
    """Remove the reductions of both parts of a mixture, and return the piece of the reduction that both must have
    here.
    """
    names = ("loss_agg_mode", "grpo_loss_agg_mode", "sft_loss_agg_mode")
    common, *parts = (arguments.pop(name, None) for name in names)
    if arguments.pop("use_token_level_loss_in_sft", None) is False:
        parts[1] = parts[1] or "seq-mean-token-mean"
    modes = {part or common or "token-mean" for part in parts}
    if len(modes) > 1:
        raise ValueError(
            f"policy_loss_fn_args have the reductions {' and '.join(sorted(modes))} for sampled and expert answers, "
            "wanted one: both parts have the one algorithm.reduction"
        )
    if common is None and not any(parts):
        return {}
    return {"reduction": {"kind": choice("policy_loss_fn_args.loss_agg_mode", modes.pop(), REDUCTIONS)}}


def _mix(arguments: Arguments) -> Pieces:
    """Return the pieces of ``(1 - mu) loss of sampled answers + mu loss of expert answers`` (arXiv 2505.17826)."""
    pieces = _mixed_reductions(arguments)
    if (share := _taken(arguments, "mu")) is not None:
        pieces["weights"] = {"rl": 1 - share, "ce": share}
    return pieces


def _mix_chord(arguments: Arguments) -> Pieces:
    """Return the schedule of imitation (arXiv 2508.11408). If ``mu_decay_steps`` is 0, Trinity-RFT's weight is at the
    valley as soon as the warm-up ends. The schedule here then falls within one step or, without a warm-up, has the
    valley as its peak.
    """
    pieces = _mixed_reductions(arguments)
    if (weighs := arguments.pop("enable_phi_function", None)) is not None:
        pieces["imitation"] = {"weight": "uncertainty" if weighs else "none"}
    names = {f"mu_{name}": name for name in ("warmup_steps", "decay_steps", "peak", "valley")}
    schedule_values = {new: arguments.pop(old) for old, new in names.items() if arguments.get(old) is not None}
    if not schedule_values:
        return pieces
    schedule = {"peak": 0.1, "valley": 0.1, "warmup_steps": 0, "decay_steps": 0} | schedule_values
    if not number_of("mu_decay_steps", schedule["decay_steps"]) and schedule["peak"] != schedule["valley"]:
        if number_of("mu_warmup_steps", schedule["warmup_steps"]):
            schedule["decay_steps"] = 1
        else:
            schedule["peak"] = schedule["valley"]
    return pieces | {"ce_schedule": schedule}


def _m2po(arguments: Arguments) -> Pieces:
    """Return the bound of the second moment (arXiv 2510.01161). Log ratios are always limited to +-20."""
    if (limit := _taken(arguments, "log_ratio_clip", 20)) != 20:
        raise ValueError(
            f"policy_loss_fn_args.log_ratio_clip is {limit:g}, wanted 20: the limit of log ratios is fixed"
        )
    bound = _taken(arguments, "m2_threshold")
    return {} if bound is None else {"correction": [{"kind": "second_moment", "bound": bound}]}


def _no_special_arguments(arguments: Arguments) -> Pieces:
    return {}


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss of Trinity-RFT."""

    pieces: Mapping[str, Any]
    """The pieces of the loss with its default arguments here."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of pieces by argument, such as ``surrogate.low``."""
    special: Callable[[Arguments], Pieces] = _no_special_arguments
    """Removes the arguments that do not correspond to a single field, and returns their pieces."""
    arguments: tuple[str, ...] = ()
    """Names of the arguments that ``special`` takes."""
    ignored: tuple[str, ...] = ()
    """Arguments that are accepted here and have no effect."""
    has_reduction: bool = True
    """Whether it has the argument ``loss_agg_mode``."""

    @property
    def has_range(self) -> bool:
        """Whether it has a clip range."""
        return "clip_range_low" in self.fields

    @property
    def known_arguments(self) -> tuple[str, ...]:
        """Names of all arguments."""
        ranges = ("clip_range",) if self.has_range else ()
        reductions = ("loss_agg_mode",) if self.has_reduction else ()
        return (*dict.fromkeys((*ranges, *self.fields, *self.arguments, *reductions, *self.ignored)),)


def _loss_of(preset: str) -> dict[str, Any]:
    return {name: piece for name, piece in PRESETS[preset].loss.items() if name != "kl"}


_RANGE = {"clip_range_low": "surrogate.low", "clip_range_high": "surrogate.high"}
_PARTS = ("loss_agg_mode", "grpo_loss_agg_mode", "sft_loss_agg_mode", "use_token_level_loss_in_sft")

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        {"surrogate": CLIP}, _RANGE | {"clip_ratio_c": "surrogate.dual"}, _ppo,
        ("enable_sequence_masking", "delta_sequence_masking", "fallback_to_policy_gradient"),
    ),
    "gspo": PolicyLoss(_loss_of("gspo"), _RANGE),
    "sapo": PolicyLoss(_loss_of("sapo"), {"tau_pos": "surrogate.positive", "tau_neg": "surrogate.negative"}),
    "cispo": PolicyLoss(
        _loss_of("cispo"), {}, _cispo,
        ("clip_range_low", "clip_range_high", "enable_mask_clip", "mask_clip_range_low", "mask_clip_range_high"),
    ),
    "topr": PolicyLoss(_loss_of("topr"), {"advantage_threshold": "surrogate.threshold"}),
    "sppo": PolicyLoss(_loss_of("sppo"), {"epsilon": "surrogate.epsilon"}),
    "opmd": PolicyLoss(_loss_of("asymre"), {}, _opmd, ("tau",)),
    "rec": PolicyLoss(
        _loss_of("rec"),
        {
            "epsilon_low": "surrogate.low",
            "epsilon_high": "surrogate.high",
            "epsilon_low_prime": "surrogate.outer_low",
            "epsilon_high_prime": "surrogate.outer_high",
            "temp": "surrogate.temperature",
        },
        _rec, ("clip_mode", "weight", "regularizer", "regularizer_coef", "fix_opd_advantage"),
    ),
    "importance_sampling": PolicyLoss(_loss_of("importance_sampling")),
    "m2po": PolicyLoss(_loss_of("m2po"), {}, _m2po, ("m2_threshold", "log_ratio_clip")),
    "sft": PolicyLoss(_loss_of("sft")),
    "sft_is": PolicyLoss(_loss_of("sft_is")),
    "sft_phi": PolicyLoss(_loss_of("sft_phi"), {"cutoff_prob": "imitation.cutoff"}),
    "mix": PolicyLoss(
        _loss_of("mix"), _RANGE | {"clip_ratio_c": "surrogate.dual"}, _mix, ("mu", *_PARTS), SIZES, has_reduction=False,
    ),
    "mix_chord": PolicyLoss(
        _loss_of("mix_chord"), _RANGE | {"clip_ratio_c": "surrogate.dual"}, _mix_chord,
        ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley", "enable_phi_function", *_PARTS), SIZES,
        has_reduction=False,
    ),
    "dpo": PolicyLoss(
        _loss_of("dpo"), {"beta": "pair.beta", "label_smoothing": "pair.label_smoothing"}, has_reduction=False
    ),
}  # fmt: skip
"""Policy losses by ``policy_loss_fn`` of Trinity-RFT, and ``m2po``, which its main branch adds."""

BY_SURROGATE = {
    "clip": "ppo",
    "truncate": "cispo",
    "gate": "sapo",
    "linear": "importance_sampling",
    "log_linear": "rec",
    "log_ratio": "sppo",
}
"""Policy loss whose arguments a preset of our own takes, by the surrogate of the preset."""
BY_PRESET = {"asymre": "opmd", "cpt": "sft", "raft": "sft"}


def policy_loss_of(name: str) -> str:
    """Return the policy loss whose arguments a preset takes; an empty name without such a loss."""
    if name in POLICY_LOSSES or name in BY_PRESET:
        return BY_PRESET.get(name, name)
    surrogate = PRESETS[name].loss.get("surrogate", CLIP)
    return BY_SURROGATE.get(surrogate["kind"], "")


def argument_pieces(name: str, arguments: Mapping[str, Any]) -> Pieces:
    """Return the pieces that arguments of a policy loss set; a piece without a kind only changes fields of the loss's
    own piece.

    Args:
        name: A key of :data:`POLICY_LOSSES`.
        arguments: Its arguments by name. Arguments with the value None count as missing.

    Raises:
        ValueError: The loss does not have an argument, or does not accept its value.
    """
    loss, rest = POLICY_LOSSES[name], {key: value for key, value in arguments.items() if value is not None}
    refuse_unknown("policy_loss_fn_args", rest, loss.known_arguments, f" for the loss {name}")
    if loss.has_range and (both := rest.pop("clip_range", None)) is not None:
        rest = {"clip_range_low": both, "clip_range_high": both} | rest
    pieces: Pieces = {}
    for key, place in loss.fields.items():
        if key in rest:
            piece, _, inner = place.partition(".")
            pieces.setdefault(piece, {})[inner] = rest.pop(key)
    pieces = merged(pieces, loss.special(rest))
    if loss.has_reduction and (mode := rest.pop("loss_agg_mode", None)) is not None:
        pieces["reduction"] = {"kind": choice("policy_loss_fn_args.loss_agg_mode", mode, REDUCTIONS)}
    return {piece: value for piece, value in pieces.items() if value != {}}
