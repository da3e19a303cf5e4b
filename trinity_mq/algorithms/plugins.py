"""Plug-ins of a loss: custom surrogates and corrections, imported by dotted path and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig, Plugin
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.plugins import import_named

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
    if isinstance(config.surrogate, Plugin):
        loaded(config.surrogate, SURROGATE)
    for rule in config.correction:
        if isinstance(rule, Plugin):
            loaded(rule, CORRECTION)


def loaded(plugin: Plugin, given: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return the function of a plug-in after a check of its signature.

    Args:
        plugin: Path of the function, and its keyword arguments.
        given: Names of the positional arguments: :data:`SURROGATE` or :data:`CORRECTION`.

    Raises:
        UnknownNameError: The function cannot be imported.
        PluginError: The function does not accept the arguments.
    """
    function = _imported(plugin.kind)
    wanted = f"def {plugin.kind.rpartition('.')[2]}({', '.join([*given, *plugin.args])}) -> Tensor"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise PluginError(f"{plugin.kind} has no signature that can be read: {error}; wanted {wanted}") from error
    places = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    if len(places) < len(given) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise PluginError(
            f"{plugin.kind} takes {len(places)} positional arguments, wanted {len(given)}: {', '.join(given)}. Write "
            f"{wanted}"
        )
    rest = _named(function, len(given))
    unknown = [name for name in plugin.args if name not in rest]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise PluginError(
            f"{plugin.kind} takes no argument {unknown[0]!r}, which args gives it; it takes "
            f"{', '.join(rest) or 'none besides ' + ', '.join(given)}. Write {wanted}, or leave it out of args"
        )
    lacking = [name for name, one in rest.items() if one.default is one.empty and name not in plugin.args]
    if lacking and given == CORRECTION:
        raise PluginError(
            f"{plugin.kind} needs an argument {lacking[0]!r}, which args does not give it; add it to args, or give it "
            "a default. Custom fields are in view.custom"
        )
    return function


def plugin_losses(
    plugin: Plugin, log_ratio: Tensor, logprob: Tensor, advantage: Tensor, custom: Mapping[str, Tensor]
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
    function = loaded(plugin, SURROGATE)
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
    given = function(log_ratio, logprob, advantage, **plugin.args, **chosen)
    losses = _checked(plugin.kind, given, log_ratio, (log_ratio, logprob, advantage))
    if log_ratio.requires_grad and not losses.requires_grad:
        raise PluginError(
            f"{plugin.kind} returns losses without a gradient: nothing would be learned. Make them of log_ratio or "
            "logprob without detach() or torch.no_grad()"
        )
    return losses


def plugin_weights(plugin: Plugin, view: TokenView) -> Tensor:
    """Return the weights of a custom correction, ``[tokens]``, checked.

    Raises:
        PluginError: The function does not return a weight of at least 0 for each token.
    """
    given = loaded(plugin, CORRECTION)(view, **plugin.args)
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        given = given.to(view.mu.dtype)
    weights = _checked(plugin.kind, given, view.mu, (view.logprob, view.mu, view.advantage)).detach()
    if (weights < 0).any():
        raise PluginError(
            f"{plugin.kind} gives a weight of {weights.min().item():.4g}, wanted at least 0: a correction weighs "
            "tokens or leaves them out, it does not turn them round"
        )
    return weights


def _imported(path: str) -> Callable[..., Tensor]:
    found = import_named("plug-in of the loss", path)
    if not callable(found) or inspect.isclass(found):
        raise PluginError(f"{path} is {found!r}, wanted a function")
    return found  # type: ignore[no-any-return]  # what it returns is checked at each call


def _named(function: Callable[..., Tensor], places: int) -> dict[str, inspect.Parameter]:
    """Return the parameters after the first ``places`` that can be passed by name."""
    parameters = list(inspect.signature(function).parameters.values())[places:]
    return {one.name: one for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}


def _checked(path: str, found: object, like: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return ``found`` if it has one number for each token, finite wherever the inputs are finite.

    Raises:
        PluginError: It has another type, shape or dtype, or such a number is not finite.
    """
    if not isinstance(found, Tensor):
        raise PluginError(f"{path} returns a {type(found).__name__}, wanted a Tensor of shape {list(like.shape)}")
    if found.shape != like.shape:
        raise PluginError(
            f"{path} returns a Tensor of shape {list(found.shape)}, wanted {list(like.shape)}: one number for each "
            "token; sums and means are the reduction's"
        )
    if found.dtype != like.dtype:
        raise PluginError(f"{path} returns a Tensor of {found.dtype}, wanted {like.dtype}, as it is given")
    finite = torch.stack([one.detach().isfinite() for one in inputs]).all(0)
    wrong = finite & ~found.detach().isfinite()
    if wrong.any():
        raise PluginError(
            f"{path} returns {found.detach()[wrong][0].item()} for {int(wrong.sum())} of {len(wrong)} tokens whose "
            "inputs are finite; mask such tokens with torch.where before exp, log or a division"
        )
    return found
