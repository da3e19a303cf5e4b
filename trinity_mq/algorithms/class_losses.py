"""Losses in class form: the bridge from Trinity-RFT's classes, which return one number for all tokens at once, to
losses that are summed over micro-batches.

A class is called once for each optimizer step, with all its tokens and the logprobs of the policy before the step. Its
gradient with respect to the logprob and the entropy of each token becomes a constant factor, so the gradient of
``sum_t slope_t logprob_t`` over any micro-batches is the gradient of the class's loss at that policy.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trinity_mq.algorithms.estimators.runs import is_finite
from trinity_mq.algorithms.evaluator import anchor_logprob
from trinity_mq.algorithms.forms import VERL_NAMES, EntropyLossFn, KLFn, PolicyLossFn
from trinity_mq.algorithms.plugins import PluginError, class_of, is_class
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, PluginPiece
from trinity_mq.runtime.errors import describe_error

MODES = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
"""Trinity-RFT's ``loss_agg_mode`` by kind of ``reduction``."""


class ClassLoss(NamedTuple):
    """The loss of the classes of a loss over the tokens of an optimizer step."""

    columns: dict[str, Tensor]
    """``slope``, ``entropy_slope`` and ``level``: columns of a :class:`TokenView`, ``[tokens]``."""
    metrics: dict[str, float]
    """The classes' metrics, and ``pg_loss``, ``kl_loss`` and ``entropy_loss`` where a class computes them. Finite."""


def has_classes(config: LossConfig) -> bool:
    """Return whether a class computes a part of the loss."""
    return config.kl_loss is not None or config.entropy_loss is not None or is_class(config.surrogate)


def load_classes(config: LossConfig) -> None:
    """Create the classes of a loss, so that errors appear before the first train step.

    Raises:
        FatalError: A class cannot be used, or does not fit the other pieces.
    """
    if is_class(config.surrogate):
        assert isinstance(config.surrogate, PluginPiece)
        _policy_loss(config, config.surrogate)
        if config.correction:
            raise PluginError(
                f"algorithm.correction is set, and the loss is the class {config.surrogate.kind}, whose tokens are not "
                "weighed: remove algorithm.correction, or weigh them in the class by rollout_log_probs"
            )
    if config.kl_loss is not None:
        _kl(config, config.kl_loss)
    if config.entropy_loss is not None:
        _entropy_term(config, config.entropy_loss)


def class_losses(view: TokenView, config: LossConfig, is_expert: Tensor) -> ClassLoss:
    """Call the classes of a loss.

    Args:
        view: All tokens of an optimizer step, with the logprobs of the policy before it.
        config: The loss.
        is_expert: bool ``[tokens]``: whether the token's answer is imitated.

    Raises:
        PluginError: A class needs an input that is not there, raised an error or did not return a loss.
    """
    assert view.entropy is not None
    with torch.enable_grad():
        logprob = view.logprob.detach().requires_grad_()
        entropy = view.entropy.detach().requires_grad_()
        rows = _Rows(view)
        inputs = _inputs(view, config, rows, is_expert)
        terms, metrics = _terms(config, rows.padded(logprob), rows.padded(entropy), inputs)
        total = torch.stack([sign * value for sign, value in terms.values()]).sum()
        if not total.requires_grad:
            raise PluginError(
                f"the classes of the loss ({', '.join(terms)}) return values without a gradient: nothing would be "
                "learned. Make them of logprob or entropy without detach(), item() or torch.no_grad()"
            )
        try:
            slopes = torch.autograd.grad(total, [logprob, entropy], allow_unused=True)
        except RuntimeError as error:  # such as a tensor that was changed in place, or a graph that is used up
            raise PluginError(f"the gradient of {', '.join(terms)} cannot be computed: {error}") from error
    slope, entropy_slope = (torch.zeros_like(logprob) if gradient is None else gradient.detach() for gradient in slopes)
    level = total.detach().expand_as(slope) / max(view.tokens, 1)
    metrics |= {name: sign * value.item() for name, (sign, value) in terms.items()}
    return ClassLoss({"slope": slope, "entropy_slope": entropy_slope, "level": level}, metrics)


class _Rows:
    """The places of a view's tokens in padded rows, ``[sequences, longest sequence]``."""

    def __init__(self, view: TokenView) -> None:
        counts = torch.bincount(view.segment, minlength=view.segments)
        starts = counts.cumsum(0) - counts
        self.row, self.first = view.segment, starts
        self.place = torch.arange(view.tokens, device=view.segment.device) - starts[view.segment]
        self.shape = (view.segments, int(counts.max()) if view.segments else 0)

    def padded(self, values: Tensor) -> Tensor:
        """Return ``[tokens]`` values as rows, padded with 0 on the right."""
        return values.new_zeros(self.shape).index_put((self.row, self.place), values)


def _inputs(view: TokenView, config: LossConfig, rows: _Rows, is_expert: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a class by their names in Trinity-RFT, except logprob and entropy."""
    columns = {
        "old_logprob": anchor_logprob(view, config.anchor).detach(),
        "rollout_log_probs": view.mu,
        "advantages": view.advantage,
        "ref_logprob": view.ref,
        "teacher_logprobs": view.teacher,
        "action_mask": torch.ones_like(view.segment, dtype=torch.bool),
    }
    inputs = {name: column[rows.first] for name, column in view.custom.items()}
    inputs |= {name: rows.padded(column) for name, column in columns.items() if column is not None}
    inputs.setdefault("expert_mask", is_expert[rows.first])
    return inputs


def _terms(
    config: LossConfig, logprob: Tensor, entropy: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[float, Tensor]], dict[str, float]]:
    """Return the sign and the value of each class's term by the name of its metric, and the classes' own metrics."""
    terms: dict[str, tuple[float, Tensor]] = {}
    metrics: dict[str, float] = {}
    mode, mask = MODES.get(config.reduction.kind, "token-mean"), inputs["action_mask"]
    if is_class(config.surrogate):
        assert isinstance(config.surrogate, PluginPiece)
        loss = _policy_loss(config, config.surrogate)
        arguments = _arguments(config.surrogate.kind, loss, {"logprob": logprob, **inputs})
        value, own_metrics = _called(config.surrogate.kind, loss, arguments)
        terms["pg_loss"] = 1.0, value
        metrics |= own_metrics
    if config.entropy_loss is not None:
        entropy_term = _entropy_term(config, config.entropy_loss)
        available = {**inputs, "entropy": entropy, "loss_agg_mode": mode}
        arguments = _arguments(config.entropy_loss.kind, entropy_term, available)
        value, own_metrics = _called(config.entropy_loss.kind, entropy_term, arguments)
        terms["entropy_loss"] = -1.0, value
        metrics |= own_metrics
    if config.kl_loss is not None:
        kl = _kl(config, config.kl_loss)
        if "ref_logprob" not in inputs:
            raise PluginError(f"{config.kl_loss.kind} compares with a reference, and this step has no such logprobs")
        arguments = {
            "logprob": logprob,
            "ref_logprob": inputs["ref_logprob"],
            "response_mask": mask,
            "loss_agg_mode": mode,
            "old_logprob": inputs["old_logprob"],
        }
        value, own_metrics = _called(config.kl_loss.kind, kl.calculate_kl_loss, arguments)
        terms["kl_loss"] = 1.0, value
        metrics |= own_metrics
    return terms, metrics


def _arguments(path: str, function: Any, available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the parameters of ``function`` name.

    Raises:
        PluginError: A parameter without a default is not available.
    """
    chosen = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
            continue
        key = name if name in available else VERL_NAMES.get(name, name)
        if key in available:
            chosen[name] = available[key]
        elif parameter.default is parameter.empty:
            advice = (
                "; set algorithm.surrogate.reference: true, so that there is a reference model"
                if key == "ref_logprob"
                else "; give each experience a CustomField with this destination_field, or give the parameter a default"
            )
            raise PluginError(f"{path} takes {name!r}, and this step has {', '.join(sorted(available))}{advice}")
    return chosen


def _called(path: str, function: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Return the scalar and the metrics that a class returns, checked."""
    try:
        result = function(**arguments)
    except Exception as error:  # custom code may raise any error
        raise PluginError(f"{path} raised {describe_error(error)}") from error
    match result:
        case (Tensor() as value, Mapping() as metrics) if value.numel() == 1:
            numbers = {
                str(name): number.item() if isinstance(number, Tensor) and number.numel() == 1 else number
                for name, number in metrics.items()
            }
            return value.reshape(()), {name: float(number) for name, number in numbers.items() if is_finite(number)}
    raise PluginError(f"{path} returns {result!r:.200}, wanted a pair: a scalar Tensor, and metrics by name")


def _policy_loss(config: LossConfig, piece: PluginPiece) -> PolicyLossFn:
    mode = MODES.get(config.reduction.kind)
    loss = _instance(piece, "backend", mode)
    if not callable(loss):
        raise PluginError(f"{piece.kind} is not callable, wanted a subclass of trinity_mq.algorithms.PolicyLossFn")
    return loss  # type: ignore[no-any-return]


def _kl(config: LossConfig, piece: PluginPiece) -> KLFn:
    kl = _instance(piece, "", None)
    if not callable(getattr(kl, "calculate_kl_loss", None)):
        raise PluginError(f"{piece.kind} has no calculate_kl_loss, wanted a subclass of trinity_mq.algorithms.KLFn")
    _mode(config, piece)
    return kl  # type: ignore[no-any-return]


def _entropy_term(config: LossConfig, piece: PluginPiece) -> EntropyLossFn:
    term = _instance(piece, "", None)
    if not callable(term):
        raise PluginError(f"{piece.kind} is not callable, wanted a subclass of trinity_mq.algorithms.EntropyLossFn")
    _mode(config, piece)
    return term  # type: ignore[no-any-return]


def _mode(config: LossConfig, piece: PluginPiece) -> str:
    mode = MODES.get(config.reduction.kind)
    if mode is None:
        raise PluginError(
            f"algorithm.reduction.kind is {config.reduction.kind}, and {piece.kind} takes a loss_agg_mode, wanted one "
            f"of {', '.join(MODES)}"
        )
    return mode


def _instance(piece: PluginPiece, backend: str, mode: str | None) -> Any:
    return _created(piece.kind, class_of(piece), json.dumps(piece.args, sort_keys=True, default=repr), backend, mode)


@functools.lru_cache(maxsize=64)
def _created(path: str, kind: type, args: str, backend: str, mode: str | None) -> Any:
    """Return the object of a class. It is created once in a process, so that it may keep a state, as in Trinity-RFT.

    Args:
        path: Dotted path of the class, for messages.
        kind: The class.
        args: Arguments of the constructor as JSON; if empty, the class's ``default_args`` hold.
        backend: Name of the argument that gets the name of the trainer, if the constructor has it. Empty: none.
        mode: Value of the argument ``loss_agg_mode``, if the arguments have it. None: unchanged.
    """
    try:
        arguments = json.loads(args) or dict(kind.default_args())  # type: ignore[attr-defined]
        if mode is not None and "loss_agg_mode" in arguments:
            arguments["loss_agg_mode"] = mode
        if backend and backend in inspect.signature(kind).parameters:
            arguments[backend] = "verl"
        return kind(**arguments)
    except Exception as error:  # custom code may raise any error
        raise PluginError(f"{path} cannot be made with args {args}: {describe_error(error)}") from error
