"""Plug-ins of a loss: custom surrogates and corrections, imported by dotted path and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, Piece, PluginPiece
from trinity_mq.runtime.errors import FatalError, custom_code
from trinity_mq.runtime.plugins import resolve

SURROGATE = ("log_ratio", "logprob", "advantage")
"""Positional arguments of a surrogate, in this order. ``args`` and custom fields follow by name."""
CORRECTION = ("view",)
"""Positional arguments of a correction. ``args`` follow by name."""


class PluginError(FatalError, ValueError):
    """A plug-in of the user cannot be used: it cannot be made, has a wrong signature, raises an error or returns a
    wrong value. The message says how to fix it.
    """


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


def has_classes(config: LossConfig) -> bool:
    """Return whether a class computes a part of the loss."""
    return config.kl_loss is not None or config.entropy_loss is not None or is_class(config.surrogate)


def load_function(plugin: PluginPiece, positional: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the function of a plug-in after a check of its signature.

    Args:
        plugin: Path of the function, and its keyword arguments.
        positional: Names of the positional arguments: :data:`SURROGATE` or :data:`CORRECTION`.

    Raises:
        UnknownNameError: The function cannot be imported.
        PluginError: The function does not accept the arguments.
    """
    function = resolve("plug-in of the loss", plugin.kind)
    if not callable(function) or inspect.isclass(function):
        raise PluginError(f"{plugin.kind} is {function!r}, wanted a function")
    wanted = f"def {plugin.kind.rpartition('.')[2]}({', '.join([*positional, *plugin.args])}) -> Tensor"
    check_signature(plugin.kind, function, positional, plugin.args, wanted, may_take_more=positional == SURROGATE)
    return function  # type: ignore[no-any-return]  # what it returns is checked at each call


def check_signature(
    path: str,
    function: Callable[..., Any],
    positional: Sequence[str],
    args: Mapping[str, Any],
    wanted: str,
    *,
    may_take_more: bool = False,
) -> None:
    """Check that a custom function accepts its arguments.

    Args:
        path: Dotted path of the function, for messages.
        function: The function.
        positional: Names of its positional arguments.
        args: Its arguments by name.
        wanted: Signature of such a function, for messages.
        may_take_more: Whether it gets more arguments by name when it is called.

    Raises:
        PluginError: The function does not accept the arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{path} has no signature that can be read: {error}; wanted {wanted}") from error
    try:
        (signature.bind_partial if may_take_more else signature.bind)(*positional, **args)
    except TypeError as error:
        raise PluginError(
            f"{path} cannot be called with {', '.join(positional)} and args {dict(args)!r}: {error}; it is "
            f"{path.rpartition('.')[2]}{signature}, wanted {wanted}"
        ) from error


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
        PluginError: The function needs a missing custom field, raised an error, or did not return a loss with a
            gradient for each token.
    """
    function = load_function(plugin, SURROGATE)
    chosen = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[len(SURROGATE) :]:
        if name in plugin.args or parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            continue
        if name in custom:
            chosen[name] = custom[name]
        elif parameter.default is parameter.empty:
            raise PluginError(
                f"{plugin.kind} takes the custom field {name!r}, and the experiences have "
                f"{', '.join(map(repr, custom)) or 'none'}; give each a CustomField with this destination_field, or "
                "give the value in args"
            )
    with custom_code(PluginError, f"{plugin.kind} raised"):
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
        PluginError: The function raised an error, or did not return a weight of at least 0 for each token.
    """
    function = load_function(plugin, CORRECTION)
    with custom_code(PluginError, f"{plugin.kind} raised"):
        result = function(view, **plugin.args)
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        result = result.to(view.mu.dtype)
    weights = _checked(plugin.kind, result, view.mu, (view.logprob, view.mu, view.advantage)).detach()
    if (weights < 0).any():
        raise PluginError(
            f"{plugin.kind} gives a weight of {weights.min().item():.4g}, wanted at least 0: a correction weighs "
            "tokens or leaves them out, and must not change their sign"
        )
    return weights


def _checked(path: str, result: object, like: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return ``result`` if it has one number for each token, finite wherever the inputs are finite.

    Raises:
        PluginError: ``result`` has another type, shape or dtype, or is not finite for a token with finite inputs.
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
