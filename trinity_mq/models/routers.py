"""Routers of a mixture-of-experts model: reads the experts that they chose for each token in a pass, or prescribes the
experts before a pass.

An engine and the trainer compute router scores with different kernels, so that near ties choose other experts and the
logprobs of the two differ. With the experts that the engine used, the trainer's logprobs differ by rounding errors only
(routing replay, arXiv 2510.11370). The weight of each expert still comes from the trainer's own router and has a
gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trinity_mq.models.errors import ModelError

ROUTER = re.compile(r"Top[kK]Router$")
"""Class names of routers in transformers. Their forward pass calls ``torch.topk`` over the scores of all experts."""
LAYER = re.compile(r"\blayers\.(\d+)\.")
UNKNOWN = -1
"""Value in a prescription: the router chooses the experts of this token itself."""
MOST_EXPERTS = 256
"""Maximum number of experts in a layer: experiences store an expert's number in a byte."""


class RouterShape(NamedTuple):
    """Sizes of a model's routers."""

    layers: int
    """Number of layers that choose experts."""
    top_k: int
    """Number of experts that compute a token in a layer."""
    experts: int
    """Number of experts among which a layer chooses."""


class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        model: Model of transformers. The forward methods of its routers are wrapped.

    Raises:
        ModelError: The model has no routers of a known kind, they differ in their number of experts or of experts per
            token, or there are more experts than :data:`MOST_EXPERTS`.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {name: module for name, module in model.named_modules() if ROUTER.search(type(module).__name__)}
        routers: list[Any] = list(named.values())
        sizes = {(int(router.num_experts), int(router.top_k)) for router in routers}
        if len(sizes) != 1:
            held = "no router of a known kind" if not routers else f"routers of different sizes {sorted(sizes)}"
            raise ModelError(
                f"model.router_replay is on, and {type(model).__name__} has {held}, wanted layers that choose among "
                "the same number of experts; set model.router_replay=false"
            )
        [(experts, top_k)] = sizes
        if experts > MOST_EXPERTS:
            raise ModelError(
                f"model.router_replay is on, and {type(model).__name__} has {experts} experts in a layer, wanted at "
                f"most {MOST_EXPERTS}; set model.router_replay=false"
            )
        self.shape = RouterShape(len(routers), top_k, experts)
        self.places = [int(number[1]) for name in named if (number := LAYER.search(name))]
        """Index, among all layers of the model, of each layer with a router."""
        self._prescribed: Tensor | None = None
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router.forward)

    def prescribe(self, experts: Tensor | None) -> None:
        """Set the experts for the following passes, also for their recomputation in a backward pass.

        Args:
            experts: Integers ``[rows, positions, layers, top_k]`` for the tokens of a pass, in its order;
                :data:`UNKNOWN` where the router chooses. None: the routers choose everywhere.
        """
        self._prescribed = None if experts is None else experts.flatten(0, 1).long()

    def chosen(self, rows: int) -> Tensor:
        """Return the experts of the last pass, uint8 ``[rows, positions, layers, top_k]``."""
        layers = [layer for layer in self._chosen if layer is not None]
        assert len(layers) == self.shape.layers, "every layer with a router takes part in a pass"
        return torch.stack(layers, 1).view(rows, -1, self.shape.layers, self.shape.top_k)

    def _route(self, layer: int, forward: Callable[..., Any], *arguments: Any, **names: Any) -> Any:
        prescribed = None if self._prescribed is None else self._prescribed[:, layer]
        choice = _Choice(self.shape, prescribed)
        with choice:
            result = forward(*arguments, **names)
        self._chosen[layer] = choice.made
        return result


class _Choice(TorchFunctionMode):
    """Replaces the choice among all experts inside a router's forward pass. Other uses of ``topk``, such as the choice
    of expert groups, are unchanged.
    """

    def __init__(self, shape: RouterShape, prescribed: Tensor | None) -> None:
        super().__init__()
        self._shape, self._prescribed = shape, prescribed
        self.made: Tensor | None = None
        """The chosen experts, uint8 ``[tokens, top_k]``. None before the choice."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), names: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(names or {}))
        if function not in {torch.topk, Tensor.topk} or result.indices.shape[1:] != (self._shape.top_k,):
            return result
        scores: Tensor = arguments[0] if arguments else (names or {})["input"]
        if scores.shape[-1] != self._shape.experts:
            return result
        if self._prescribed is not None:
            is_known = self._prescribed[:, :1] != UNKNOWN
            indices = torch.where(is_known, self._prescribed, result.indices)
            result = torch.return_types.topk((scores.gather(-1, indices), indices))
        self.made = result.indices.to(torch.uint8)
        return result
