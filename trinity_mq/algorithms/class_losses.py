"""Losses in class form: the bridge from Trinity-RFT's classes, which return one number for all tokens at once, to
losses that are summed over micro-batches.

A class is called once for each optimizer step, with all tokens of the step and the logprobs of the policy before the
step. The gradient of its loss with respect to the logprob and the entropy of each token becomes a constant factor, so
the gradient of ``sum_t (slope_t logprob_t + entropy_slope_t entropy_t)`` over any micro-batches is the gradient of the
class's loss at that policy.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_mq.algorithms.estimators.runs import finite_metrics
from trinity_mq.algorithms.evaluator import anchor_logprob
from trinity_mq.algorithms.forms import VERL_NAMES, KLFn
from trinity_mq.algorithms.plugins import PluginError, is_class
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, PluginPiece
from trinity_mq.config.algorithm.trinity_losses import REDUCTIONS
from trinity_mq.runtime.errors import custom_code
from trinity_mq.runtime.plugins import resolve

MODES = {kind: mode for mode, kind in REDUCTIONS.items()}
"""Trinity-RFT's ``loss_agg_mode`` by kind of ``reduction``."""


class ClassLoss(NamedTuple):
    """The loss that the user's classes compute over the tokens of an optimizer step."""

    columns: dict[str, Tensor]
    """Columns of a :class:`TokenView`, ``[tokens]``: ``slope``, ``entropy_slope`` and ``level``.
    :func:`trinity_mq.training.update.step_columns` adds others."""
    metrics: dict[str, float]
    """The classes' finite metrics; and the terms of the loss that a class computes, ``pg_loss``, ``kl_loss`` and
    ``entropy_loss``, which may be non-finite and replace a metric of the same name."""


class _Form(NamedTuple):
    """A class form of Trinity-RFT that computes a term of the loss."""

    piece: str
    """Field of :class:`LossConfig` that names the class."""
    base: str
    """Base class in :mod:`trinity_mq.algorithms`."""
    method: str
    """Method that computes the term."""
    metric: str
    sign: float
    takes: tuple[str, ...]
    """Inputs of the method besides the tensors that every form gets."""


_FORMS = (
    _Form("surrogate", "PolicyLossFn", "__call__", "pg_loss", 1.0, ("logprob",)),
    _Form("entropy_loss", "EntropyLossFn", "__call__", "entropy_loss", -1.0, ("entropy", "loss_agg_mode")),
    _Form("kl_loss", "KLFn", "calculate_kl_loss", "kl_loss", 1.0, ("logprob", "loss_agg_mode")),
)

_KL_INPUTS = tuple(inspect.signature(KLFn.calculate_kl_loss).parameters)


def load_classes(config: LossConfig) -> None:
    """Create the objects of the user's classes of a loss, so that errors appear before the first train step.

    Raises:
        FatalError: A class cannot be used, or the surrogate is a class and ``algorithm.correction`` is set.
    """
    _methods(config)
    if config.correction and is_class(config.surrogate):
        raise PluginError(
            f"algorithm.correction is set, and the loss is the class {config.surrogate.kind}, whose tokens are not "
            "weighed: remove algorithm.correction, or weigh them in the class by rollout_log_probs"
        )


def class_losses(view: TokenView, config: LossConfig, is_expert: Tensor) -> ClassLoss:
    """Call the user's classes of a loss, and return their value, gradients and metrics.

    Args:
        view: All tokens of an optimizer step, at least one, with the logprobs and entropies of the policy before the
            step.
        config: The loss.
        is_expert: bool ``[tokens]``: whether the token's answer is imitated.

    Raises:
        PluginError: A class needs a missing input, raised an error or did not return a loss, or the loss has a gradient
            neither in the logprobs nor in the entropies.
    """
    assert view.entropy is not None
    terms: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    with torch.enable_grad():
        logprob = view.logprob.detach().requires_grad_()
        entropy = view.entropy.detach().requires_grad_()
        counts = view.segment.bincount().tolist()
        inputs = _inputs(view, counts, config, is_expert)
        others = {
            "logprob": _padded(logprob, counts),
            "entropy": _padded(entropy, counts),
            "loss_agg_mode": _mode(config),
        }
        for form, path, method in _methods(config):
            available = {**inputs, **{name: others[name] for name in form.takes}}
            if form.base == KLFn.__name__:  # the method may pass its **kwargs on to the method of the base class
                available["response_mask"] = inputs["action_mask"]
                available = {name: available[name] for name in _KL_INPUTS if name in available}
            value, own_metrics = _called(path, method, _arguments(path, method, available))
            terms[form.metric] = form.sign * value
            metrics |= own_metrics
        total = torch.stack(list(terms.values())).sum()
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
    level = total.detach().expand_as(slope) / view.tokens
    metrics |= {name: value.item() for name, value in terms.items()}
    return ClassLoss({"slope": slope, "entropy_slope": entropy_slope, "level": level}, metrics)


def _padded(values: Tensor, counts: list[int]) -> Tensor:
    """Return ``[tokens]`` values as rows ``[sequences, longest sequence]``, padded with 0 on the right. Row by row,
    ``counts`` holds the number of tokens.
    """
    return pad_sequence(list(torch.split(values, counts)), batch_first=True)


def _inputs(view: TokenView, counts: list[int], config: LossConfig, is_expert: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a class may take as arguments, by their names in Trinity-RFT, except logprob and entropy.
    Tensors that the step does not have are left out.
    """
    columns = {
        "old_logprob": anchor_logprob(view, config.anchor).detach(),
        "rollout_log_probs": view.mu,
        "advantages": view.advantage,
        "ref_logprob": view.ref,
        "teacher_logprobs": view.teacher,
        "action_mask": torch.ones_like(view.segment, dtype=torch.bool),
    }
    inputs = {name: column[view.first] for name, column in view.custom.items()}
    inputs |= {name: _padded(column, counts) for name, column in columns.items() if column is not None}
    inputs.setdefault("expert_mask", is_expert[view.first])
    return inputs


def _methods(config: LossConfig) -> list[tuple[_Form, str, Callable[..., Any]]]:
    """Return the form, the dotted path and the method of each class of a loss.

    Raises:
        PluginError: A class cannot be used.
    """
    methods = []
    for form in _FORMS:
        piece, is_surrogate = getattr(config, form.piece), form.piece == "surrogate"
        if not isinstance(piece, PluginPiece) or (is_surrogate and not is_class(piece)):
            continue
        mode = _mode(config)
        if mode is None and "loss_agg_mode" in form.takes:
            raise PluginError(
                f"algorithm.reduction.kind is {config.reduction.kind}, and {piece.kind} takes a loss_agg_mode, wanted "
                f"one of {', '.join(MODES)}"
            )
        args = json.dumps(piece.args, sort_keys=True, default=repr)
        kind = resolve("plug-in of the loss", piece.kind)
        if not inspect.isclass(kind):
            raise PluginError(f"{piece.kind} is {kind!r}, wanted a subclass of trinity_mq.algorithms.{form.base}")
        backend, own_mode = ("backend", mode) if is_surrogate else ("", None)
        made = _created(piece.kind, kind, args, backend, own_mode)  # type: ignore[arg-type]  # mypy: not Hashable
        method = getattr(made, form.method, None)
        if not callable(method):
            raise PluginError(
                f"{piece.kind} has no {form.method}, wanted a subclass of trinity_mq.algorithms.{form.base}"
            )
        methods.append((form, piece.kind, method))
    return methods


def _mode(config: LossConfig) -> str | None:
    return MODES.get(config.reduction.kind)


def _arguments(path: str, function: Any, available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``available`` that are parameters of ``function``, under veRL's names too; all entries if
    it has ``**kwargs``.

    Raises:
        PluginError: A parameter without a default is not available.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    chosen = dict(available) if takes_any else {}
    for name, parameter in parameters.items():
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
    """Call the method of a class, check its result, and return the scalar and the finite metrics."""
    with custom_code(PluginError, f"{path} raised"):
        result = function(**arguments)
    match result:
        case (Tensor() as value, Mapping() as metrics) if value.numel() == 1:
            return value.reshape(()), finite_metrics(metrics)
    raise PluginError(f"{path} returns {result!r:.200}, wanted a pair: a scalar Tensor, and metrics by name")


@functools.lru_cache(maxsize=64)
def _created(path: str, kind: Any, args: str, backend: str, mode: str | None) -> Any:
    """Return the object of a class. A process creates the object once, so that the object may keep a state, as in
    Trinity-RFT.

    Args:
        path: Dotted path of the class, for messages.
        kind: The class.
        args: Arguments of the constructor as a JSON object; if it is empty, the class's ``default_args`` are used.
        backend: Name of the argument that gets the value ``verl``, Trinity-RFT's name of the trainer, if the
            constructor has this argument. Empty: no argument gets it.
        mode: Value of the argument ``loss_agg_mode``, if the arguments have it. None: unchanged.
    """
    with custom_code(PluginError, f"{path} cannot be made with args {args}:"):
        arguments = json.loads(args) or dict(kind.default_args())
        if mode is not None and "loss_agg_mode" in arguments:
            arguments["loss_agg_mode"] = mode
        if backend and backend in inspect.signature(kind).parameters:
            arguments[backend] = "verl"
        return kind(**arguments)
