"""The trained tokens of an optimizer step, or of a part of it, as flat tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this limit: exp(20) is finite, and tokens beyond the limit should not move the
policy.
"""


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """Inputs of the parts of a loss: ``[tokens]`` each, trained tokens only. The tokens of a sequence are contiguous.

    Logprobs are in nats, at the sampling temperature. Columns other than ``logprob`` have no gradient, unless stated.
    """

    logprob: Tensor
    """Logprob of the policy being trained, with gradient."""
    mu: Tensor
    """Logprob of the sampling policy, as the engine returned it."""
    advantage: Tensor
    scale: Tensor
    """Factor of the token's loss in the reduction, computed from the counts of the whole optimizer step."""
    segment: Tensor
    """int64: number of the token's sequence in this view, ascending from 0."""
    old: Tensor | None = None
    """Logprob of the policy at the start of the train step."""
    ref: Tensor | None = None
    """Logprob of the reference policy."""
    teacher: Tensor | None = None
    entropy: Tensor | None = None
    """Entropy of the policy being trained, with gradient if requested."""
    entropy_baseline: Tensor | None = None
    """Expectation of ``p (H + log p)`` over the vocabulary, of the policy before the optimizer step; see
    :func:`trinity_mq.algorithms.scoring.entropy_baselines`."""
    staleness: Tensor | None = None
    """Train steps between the weights that sampled the token and the weights at the start of the train step, at least
    0.
    """
    weight: Tensor | None = None
    """Product of the corrections computed over the whole optimizer step; 0 excludes the token."""
    chosen: Tensor | None = None
    """bool: tokens that a selective regulariser (kl_cov) applies to."""
    slope: Tensor | None = None
    """Derivative of the loss of the user's classes with respect to the token's logprob; see
    :mod:`trinity_mq.algorithms.class_losses`."""
    entropy_slope: Tensor | None = None
    """Derivative of the loss of the user's classes with respect to the token's entropy."""
    level: Tensor | None = None
    """Share of the token in the value of the loss of the user's classes."""
    custom: Mapping[str, Tensor] = field(default_factory=dict)
    """``[tokens, ...]`` each: the custom fields of the tokens' experiences, for plug-ins."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.segment.shape[0]

    @property
    def segments(self) -> int:
        """Number of sequences."""
        return int(self.segment[-1]) + 1 if self.tokens else 0

    @property
    def first(self) -> Tensor:
        """Bool ``[tokens]``: whether a token is the first of its sequence."""
        return self.segment.diff(prepend=self.segment.new_tensor([-1])) > 0

    def where(self, selection: Tensor) -> TokenView:
        """Return the view of the tokens that ``selection`` selects: a bool mask or token indexes. Sequences are
        renumbered.
        """
        columns: dict[str, Any] = {
            name: column[selection] for name, column in vars(self).items() if isinstance(column, Tensor)
        }
        _, columns["segment"] = torch.unique_consecutive(columns["segment"], return_inverse=True)
        return replace(self, **columns, custom={name: column[selection] for name, column in self.custom.items()})


def sequence_sums(values: Tensor, view: TokenView) -> Tensor:
    """Return the sum of ``values`` over each sequence, ``[sequences]``."""
    return values.new_zeros(view.segments).index_add(0, view.segment, values)


def segment_sums(values: Tensor, view: TokenView) -> Tensor:
    """Return the sum of ``values`` over each sequence, ``[tokens]``: every token gets the sum of its sequence."""
    return sequence_sums(values, view)[view.segment]


def segment_means(values: Tensor, view: TokenView) -> Tensor:
    """Return the mean of ``values`` over the trained tokens of each sequence, ``[tokens]``."""
    return segment_sums(values, view) / segment_sums(torch.ones_like(values), view)


def segment_maxima(values: Tensor, view: TokenView) -> Tensor:
    """Return the maximum of ``values`` in each sequence, ``[tokens]``."""
    start = values.new_full((view.segments,), -torch.inf)
    return start.scatter_reduce(0, view.segment, values, "amax")[view.segment]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return a log ratio clamped to +-``LOG_RATIO_LIMIT``."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
