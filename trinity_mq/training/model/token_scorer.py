"""A causal language model that returns scores of chosen tokens instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trinity_mq.algorithms.scoring import HeadOperation, Scores, entropy_baselines, head_scores, token_logprobs


class TokenScorer(nn.Module):
    """Logprobs and entropies of chosen tokens, from the hidden states at the input of the model's head.

    The head itself is called with zero tokens. Its weight is read in this module's forward pass, and every tensor with
    a gradient leaves through this module's outputs. So this module must be the root for sharding
    (``torch.distributed.fsdp.fully_shard``): the weight is then unsharded in this forward pass, and again when the
    backward pass recomputes the logits. Adapters must be added to the model before this module wraps it.
    """

    def __init__(self, model: Any) -> None:
        """Find out what the model does after its head. The model has its weights and is on its device.

        Raises:
            ValueError: The model has no head.
        """
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings to take logits from")
        self._places: tuple[Tensor, Tensor] | None = None
        self._hidden: Tensor | None = None
        self.after = detect_head_operation(model)
        """Operation after the head. None: the operation is unknown, so the model computes the logits of all chosen
        tokens at once.
        """
        head.register_forward_pre_hook(self._take)

    def _take(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Keep only the hidden states of the chosen tokens, because logits of all tokens would be the largest tensor of
        the pass.
        """
        if self._places is None:
            return None
        self._hidden = arguments[0][self._places]
        return (self._hidden if self.after is None else self._hidden[:0],)

    def forward(
        self,
        inputs: dict[str, Any],
        places: tuple[Tensor, Tensor],
        targets: Tensor,
        temperature: Tensor,
        *,
        entropy_gradient: bool,
        with_baseline: bool = False,
    ) -> Scores:
        """Return the scores of the tokens; see :func:`trinity_mq.algorithms.scoring.head_scores`.

        Args:
            inputs: Arguments for the model.
            places: Row and position in ``input_ids`` that predict each token, both int64 ``[tokens]``.
            targets: Token ids, int64 ``[tokens]``.
            temperature: Sampling temperatures, float32 ``[tokens]``.
            entropy_gradient: Whether the entropies have a gradient.
            with_baseline: Whether to return the entropy baselines.
        """
        self._places = places
        try:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
            hidden = self._hidden
        finally:
            self._places = self._hidden = None
        if self.after is not None:
            assert hidden is not None
            return head_scores(
                hidden,
                self.model.get_output_embeddings(),
                targets,
                temperature,
                self.after,
                entropy_gradient=entropy_gradient,
                with_baseline=with_baseline,
            )
        columns = token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
        return Scores(*columns, entropy_baselines(logits, temperature) if with_baseline else None)


@torch.no_grad()
def detect_head_operation(model: Any) -> HeadOperation | None:
    """Return the operation that a model applies to the output of its head, or None if the operation is unknown.

    The settings of Gemma (``final_logit_softcapping``), Cohere (``logit_scale``) and Granite (``logits_scaling``) come
    from the configuration. Then a test run checks them: the model runs on four tokens with random numbers instead of
    the head's output, and its logits are compared with the result of the operation on these numbers.
    """
    settings = model.config.get_text_config()
    factor, divisor = (getattr(settings, name, None) for name in ("logit_scale", "logits_scaling"))
    scale = (factor if isinstance(factor, int | float) else 1.0) / (divisor or 1.0)
    after = HeadOperation(scale, getattr(settings, "final_logit_softcapping", None) or None)
    products: list[Tensor] = []

    def replace(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        products.append((20 * torch.randn(output.shape, generator=generator)).to(output))
        return products[-1]

    handle = model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    finally:
        handle.remove()
    is_known = logits.shape == products[0].shape and torch.allclose(
        after(products[0].float()), logits.float(), rtol=1e-5
    )
    return after if is_known else None
