"""The loss of a value function, one number per token."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return ``max((v - R)^2, (clip(v, old - bound, old + bound) - R)^2) / 2`` of each token. A value that has moved
    further than ``bound`` towards its return has no gradient (the clipped value loss of PPO's authors, described in
    arXiv 2005.12729, section 3).

    Args:
        values: Values of the trained value function, ``[tokens]``, with gradient.
        old: Its values at the start of the train step, ``[tokens]``.
        returns: Targets of the values, ``[tokens]``.
        bound: Largest change without a clip, above 0.

    Returns:
        The losses, ``[tokens]``, and whether the clip cuts each token's gradient, bool ``[tokens]``.
    """
    plain = (values - returns).square()
    clipped = (torch.clamp(values, old - bound, old + bound) - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()
