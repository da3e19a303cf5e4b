"""Routers of a mixture-of-experts model: the experts they choose for each token, read after a pass or prescribed before
one.

An engine and the trainer compute router scores with different kernels, so that near ties choose other experts and the
logprobs of the two differ. With the experts that the engine used, the trainer's logprobs differ by rounding errors only
(routing replay, arXiv 2510.11370). The weight of each expert still comes from the trainer's own router and has a
gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trinity_mq.models.errors import ModelError

ROUTER = re.compile(r"Top[kK]Router$")
"""Class names of routers in transformers. Their forward pass calls ``torch.topk`` over the scores of all experts."""
LAYER = re.compile(r"\blayers\.(\d+)\.")
UNKNOWN = -1
"""In a prescription: the router chooses the experts of this token itself."""
MOST_EXPERTS = 256
"""Experiences keep an expert's number in a byte."""


class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        model: Model of transformers. The forward methods of its routers are wrapped.

    Raises:
        ModelError: The model has no routers of a known kind, they differ in their number of experts per token, or there
            are more experts than :data:`MOST_EXPERTS`.
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
        [(experts, self.top_k)] = sizes
        if experts > MOST_EXPERTS:
            raise ModelError(
                f"model.router_replay is on, and {type(model).__name__} has {experts} experts in a layer, wanted at "
                f"most {MOST_EXPERTS}; set model.router_replay=false"
            )
        self.layers = len(routers)
        self.places = [int(number[1]) for name in named if (number := LAYER.search(name))]
        """Number of each of these layers among all layers of the model."""
        self._prescribed: Tensor | None = None
        self._chosen: list[Tensor | None] = [None] * self.layers
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, experts, router.forward)
        self._experts = experts

    def prescribe(self, experts: Tensor | None) -> None:
        """Set the experts for the following passes, also for their recomputation in a backward pass.

        Args:
            experts: Integers ``[rows, positions, layers, top_k]`` for the tokens of a pass, in its order;
                :data:`UNKNOWN` where the router chooses. None: the routers choose everywhere.

        Raises:
            ValueError: The experts belong to another model.
        """
        if experts is not None and (
            experts.shape[2:] != (self.layers, self.top_k) or not -1 <= int(experts.max()) < self._experts
        ):
            raise ValueError(
                f"an experience has routed_experts of {list(experts.shape[2:])} layers and experts per token, up to "
                f"expert {int(experts.max())}, and the model has {[self.layers, self.top_k]} and {self._experts} "
                "experts; train on experiences of this model, or set model.router_replay=false"
            )
        self._prescribed = None if experts is None else experts.flatten(0, 1).long()

    def chosen(self, rows: int) -> Tensor:
        """Return the experts of the last pass, uint8 ``[rows, positions, layers, top_k]``."""
        layers = [layer for layer in self._chosen if layer is not None]
        assert len(layers) == self.layers, "every layer with a router takes part in a pass"
        return torch.stack(layers, 1).view(rows, -1, self.layers, self.top_k)

    def _route(self, layer: int, experts: int, forward: Callable[..., Any], *arguments: Any, **names: Any) -> Any:
        prescribed = None if self._prescribed is None else self._prescribed[:, layer]
        choice = _Choice(experts, self.top_k, prescribed)
        with choice:
            result = forward(*arguments, **names)
        self._chosen[layer] = choice.made
        return result


class _Choice(TorchFunctionMode):
    """Replaces the choice among all experts inside a router's forward pass. Other uses of ``topk``, such as the choice
    of expert groups, are unchanged.
    """

    def __init__(self, experts: int, top_k: int, prescribed: Tensor | None) -> None:
        super().__init__()
        self._experts, self._top_k, self._prescribed = experts, top_k, prescribed
        self.made: Tensor | None = None
        """uint8 ``[tokens, top_k]``: the experts."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), names: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(names or {}))
        if function not in {torch.topk, Tensor.topk} or result.indices.shape[1:] != (self._top_k,):
            return result
        scores: Tensor = arguments[0] if arguments else (names or {})["input"]
        if scores.shape[-1] != self._experts:
            return result
        if self._prescribed is not None:
            is_known = self._prescribed[:, :1] != UNKNOWN
            indices = torch.where(is_known, self._prescribed, result.indices)
            result = torch.return_types.topk((scores.gather(-1, indices), indices))
        self.made = result.indices.to(torch.uint8)
        return result
