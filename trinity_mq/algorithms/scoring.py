"""Logprobs of chosen tokens from logits, and what the distribution that they were chosen from says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """What a policy says about tokens, float32 ``[tokens]`` each, in nats."""

    logprob: Tensor
    entropy: Tensor
    entropy_baseline: Tensor | None = None
    """See :func:`entropy_baselines`; None where it was not asked for."""


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
        entropy = -(distribution.exp() * _finite(distribution)).sum(-1)
    return logprobs, entropy


@torch.no_grad()
def entropy_baselines(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``sum_i p_i^2 (H + log p_i)`` over the vocabulary for each token, float32 ``[tokens]``.

    It is the expectation over ``p`` of ``S_i = p_i (H + log p_i)``, and what the entropy's change has as its baseline:
    a policy gradient step on the logits, ``a (onehot_k - p)``, changes the entropy by ``-a (S_k - sum_i p_i S_i)`` to
    first order (arXiv 2602.03392, theorem 3.3).

    Args:
        logits: ``[tokens, vocabulary]``; computed with in float32.
        temperature: float32 ``[tokens]``, above 0.
    """
    distribution = (logits.float() / temperature[:, None]).log_softmax(-1)
    probability, distribution = distribution.exp(), _finite(distribution)
    entropy = -(probability * distribution).sum(-1, keepdim=True)
    return (probability.square() * (entropy + distribution)).sum(-1)


def _finite(distribution: Tensor) -> Tensor:
    """Return logprobs without -inf: such a token has probability 0 and no part in a sum, but 0 * -inf would be NaN."""
    return distribution.clamp_min(torch.finfo(distribution.dtype).min)
