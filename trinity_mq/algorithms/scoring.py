"""Logprobs and entropies of chosen tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return logprobs of ``targets`` and entropies under ``softmax(logits / temperature)``, in nats.

    Args:
        logits: ``[tokens, vocabulary]``; computed with in float32.
        targets: int64 ``[tokens]``.
        temperature: float32 ``[tokens]``, above 0: what the sampler divided by.
        entropy_gradient: Whether the entropies are differentiated; without, their graph is not kept.

    Returns:
        Two float32 tensors ``[tokens]``.
    """
    distribution = (logits.float() / temperature[:, None]).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # a logit of -inf has probability 0 and no part in the entropy: 0 * -inf would be NaN
        entropy = -(distribution.exp() * distribution.clamp_min(torch.finfo(distribution.dtype).min)).sum(-1)
    return logprobs, entropy
