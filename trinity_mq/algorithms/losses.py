"""Policy losses over flat tensors of trained tokens. Sums, never means: the caller divides by the step's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.algorithm.pieces import Clip

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to it: exp(20) is finite, and no such token should move the policy."""


@dataclass(frozen=True)
class LossTerms:
    """A loss and what is worth knowing about it."""

    loss: Tensor
    """Scalar with gradient: the sum over tokens."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars that are summed over tokens; divided by the token count they are metrics."""
    maxima: dict[str, Tensor] = field(default_factory=dict)


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


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig
) -> LossTerms:
    """Return ``-sum J`` with ``r = exp(logprobs - old_logprobs)`` and ``J = min(r A, clip(r, 1 - low, 1 + high) A)``,
    where ``A < 0`` not below ``c A``.

    PPO's clipped objective (arXiv 1707.06347, equation 7) with the asymmetric range of DAPO (arXiv 2503.14476) and the
    lower bound of dual-clip PPO (arXiv 1912.09729, equation 5), without which a sample that has become likely since it
    was drawn, and was bad, has a gradient of ``r |A|`` without end. Divided by the tokens of the whole optimizer step
    it is DAPO's token mean.

    Args:
        logprobs: float32 ``[tokens]`` of the policy being trained, with gradient.
        old_logprobs: float32 ``[tokens]`` of the policy that sampled.
        advantages: float32 ``[tokens]``.
        config: The clip range, and ``c`` as ``dual``.

    Returns:
        The loss; sums ``pg_clipfrac`` and ``pg_clipfrac_lower`` (tokens where the clip, and where the lower bound cuts
        the gradient), ``ppo_kl`` and ``ppo_kl_k3`` (estimators k1 and k3 of KL(old, new) in nats,
        http://joschu.net/blog/kl-approx.html); maximum ``ratio_max``.
    """
    assert isinstance(config.surrogate, Clip)
    clip = config.surrogate
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    objective = torch.min(plain, clipped)
    bound = objective if clip.dual is None else clip.dual * advantages
    bounded = torch.where(advantages < 0, torch.max(objective, bound), objective)
    loss = -bounded.sum()
    with torch.no_grad():
        sums = {
            "pg_clipfrac": (clipped < plain).sum(),
            "pg_clipfrac_lower": (bounded > objective).sum(),
            "ppo_kl": -log_ratio.sum(),
            "ppo_kl_k3": (ratio - 1 - log_ratio).sum(),
        }
        return LossTerms(loss, sums, {"ratio_max": ratio.max()})
