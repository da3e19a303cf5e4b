"""Plug-ins of a loss: custom surrogates and corrections, imported by dotted path and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, Piece, PluginPiece
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.plugins import resolve

SURROGATE = ("log_ratio", "logprob", "advantage")
"""Positional arguments of a surrogate, in this order. ``args`` and custom fields follow by name."""
CORRECTION = ("view",)
"""Positional arguments of a correction. ``args`` follow by name."""


class PluginError(FatalError, ValueError):
    """A plug-in has a wrong signature or returns a wrong value; the message says how to fix it."""


def load_plugins(config: LossConfig) -> None:
    """Import and check the plug-ins of a loss, so that errors appear before the first train step.

    Raises:
        FatalError: A plug-in cannot be used.
    """
    if isinstance(config.surrogate, PluginPiece) and not is_class(config.surrogate):
        load_function(config.surrogate, SURROGATE)
    for rule in config.correction:
        if isinstance(rule, PluginPiece):
            load_function(rule, CORRECTION)


def is_class(piece: Piece) -> bool:
    """Return whether a piece is a class of the user's own whose objects can be called.

    Raises:
        UnknownNameError: It cannot be imported.
    """
    kind = resolve("plug-in of the loss", piece.kind) if isinstance(piece, PluginPiece) else None
    return inspect.isclass(kind) and any("__call__" in vars(base) for base in kind.__mro__)


def class_of(piece: PluginPiece) -> type:
    """Return the class that a piece names.

    Raises:
        UnknownNameError: It cannot be imported.
        PluginError: It is not a class.
    """
    kind = resolve("plug-in of the loss", piece.kind)
    if not inspect.isclass(kind):
        raise PluginError(f"{piece.kind} is {kind!r}, wanted a class in the form of Trinity-RFT's")
    return kind


def load_function(plugin: PluginPiece, positional: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the function of a plug-in after a check of its signature.

    Args:
        plugin: Path of the function, and its keyword arguments.
        positional: Names of the positional arguments: :data:`SURROGATE` or :data:`CORRECTION`.

    Raises:
        UnknownNameError: The function cannot be imported.
        PluginError: The function does not accept the arguments.
    """
    function = _imported(plugin.kind)
    signature = f"def {plugin.kind.rpartition('.')[2]}({', '.join([*positional, *plugin.args])}) -> Tensor"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise PluginError(f"{plugin.kind} has no signature that can be read: {error}; wanted {signature}") from error
    places = [
        parameter
        for parameter in parameters
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    if len(places) < len(positional) and not any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters
    ):
        raise PluginError(
            f"{plugin.kind} takes {len(places)} positional arguments, wanted {len(positional)}: "
            f"{', '.join(positional)}. Write {signature}"
        )
    rest = _named(function, len(positional))
    unknown = [name for name in plugin.args if name not in rest]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise PluginError(
            f"{plugin.kind} takes no argument {unknown[0]!r}, which args gives it; it takes "
            f"{', '.join(rest) or 'none besides ' + ', '.join(positional)}. Write {signature}, or leave it out of args"
        )
    lacking = [
        name for name, parameter in rest.items() if parameter.default is parameter.empty and name not in plugin.args
    ]
    if lacking and positional == CORRECTION:
        raise PluginError(
            f"{plugin.kind} needs an argument {lacking[0]!r}, which args does not give it; add it to args, or give it "
            "a default. Custom fields are in view.custom"
        )
    return function


def plugin_losses(
    plugin: PluginPiece, log_ratio: Tensor, logprob: Tensor, advantage: Tensor, custom: Mapping[str, Tensor]
) -> Tensor:
    """Return the losses of a custom surrogate, ``[tokens]``, checked.

    Args:
        plugin: The function and its keyword arguments.
        log_ratio: ``[tokens]``, with gradient.
        logprob: ``[tokens]``, with gradient.
        advantage: ``[tokens]``.
        custom: ``[tokens, ...]`` each. The function gets the fields that match its parameters.

    Raises:
        PluginError: The function needs a missing custom field, or does not return a loss for each token.
    """
    function = load_function(plugin, SURROGATE)
    chosen = {}
    for name, parameter in _named(function, len(SURROGATE)).items():
        if name in plugin.args:
            continue
        if name in custom:
            chosen[name] = custom[name]
        elif parameter.default is parameter.empty:
            raise PluginError(
                f"{plugin.kind} takes the custom field {name!r}, and the experiences have "
                f"{', '.join(map(repr, custom)) or 'none'}; give each a CustomField with this destination_field, or "
                "give the value in args"
            )
    result = function(log_ratio, logprob, advantage, **plugin.args, **chosen)
    losses = _checked(plugin.kind, result, log_ratio, (log_ratio, logprob, advantage))
    if log_ratio.requires_grad and not losses.requires_grad:
        raise PluginError(
            f"{plugin.kind} returns losses without a gradient: nothing would be learned. Make them of log_ratio or "
            "logprob without detach() or torch.no_grad()"
        )
    return losses


def plugin_weights(plugin: PluginPiece, view: TokenView) -> Tensor:
    """Return the weights of a custom correction, ``[tokens]``, checked.

    Raises:
        PluginError: The function does not return a weight of at least 0 for each token.
    """
    result = load_function(plugin, CORRECTION)(view, **plugin.args)
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        result = result.to(view.mu.dtype)
    weights = _checked(plugin.kind, result, view.mu, (view.logprob, view.mu, view.advantage)).detach()
    if (weights < 0).any():
        raise PluginError(
            f"{plugin.kind} gives a weight of {weights.min().item():.4g}, wanted at least 0: a correction weighs "
            "tokens or leaves them out, and must not change their sign"
        )
    return weights


def _imported(path: str) -> Callable[..., Tensor]:
    function = resolve("plug-in of the loss", path)
    if not callable(function) or inspect.isclass(function):
        raise PluginError(f"{path} is {function!r}, wanted a function")
    return function  # type: ignore[no-any-return]  # what it returns is checked at each call


def _named(function: Callable[..., Tensor], places: int) -> dict[str, inspect.Parameter]:
    """Return the parameters after the first ``places`` that can be passed by name."""
    parameters = list(inspect.signature(function).parameters.values())[places:]
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }


def _checked(path: str, result: object, like: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return ``result`` if it has one number for each token, finite wherever the inputs are finite.

    Raises:
        PluginError: It has another type, shape or dtype, or such a number is not finite.
    """
    if not isinstance(result, Tensor):
        raise PluginError(f"{path} returns a {type(result).__name__}, wanted a Tensor of shape {list(like.shape)}")
    if result.shape != like.shape:
        raise PluginError(
            f"{path} returns a Tensor of shape {list(result.shape)}, wanted {list(like.shape)}: one number for each "
            "token; sums and means are the reduction's"
        )
    if result.dtype != like.dtype:
        raise PluginError(f"{path} returns a Tensor of {result.dtype}, wanted {like.dtype}, as it is given")
    finite = torch.stack([tensor.detach().isfinite() for tensor in inputs]).all(0)
    nonfinite = finite & ~result.detach().isfinite()
    if nonfinite.any():
        raise PluginError(
            f"{path} returns {result.detach()[nonfinite][0].item()} for {int(nonfinite.sum())} of {len(nonfinite)} "
            "tokens whose inputs are finite; mask such tokens with torch.where before exp, log or a division"
        )
    return result
