"""Sums and means over the tokens of a mask, for losses and advantages in Trinity-RFT's class form: padded tensors,
``[sequences, tokens]``, and a mask of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SMALL = 1e-8
"""Added to counts and variances, as in Trinity-RFT 0.6."""


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the values in the mask, over all dimensions or over ``axis``; other values may be infinite."""
    inside = torch.where(mask.bool(), values, 0.0) * mask
    return inside.sum() if axis is None else inside.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values in the mask, over all dimensions or over ``axis``; 0 for an empty mask."""
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + SMALL)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values in the mask.

    Raises:
        ValueError: ``unbiased``, and the mask has fewer than two tokens.
    """
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count < 2:
        raise ValueError(f"the mask has {int(count)} tokens, wanted at least 2 for an unbiased variance")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return the values scaled to variance 1 in the mask. Their mean in the mask becomes 0, or stays the same without
    ``shift_mean``.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + SMALL)
    return whitened if shift_mean else whitened + mean


def aggregate_loss(
    values: Tensor, mask: Tensor, loss_agg_mode: str = "token-mean", normalizer: float | None = None
) -> Tensor:
    """Return the token losses in the mask reduced to a scalar.

    Args:
        values: ``[sequences, tokens]``.
        mask: ``[sequences, tokens]``.
        loss_agg_mode: ``token-mean``: mean over all tokens. ``seq-mean-token-sum``: mean over sequences of their sums.
            ``seq-mean-token-mean``: mean over sequences of their means. ``seq-mean-token-sum-norm``: sum divided by
            ``normalizer``.
        normalizer: Divisor of ``seq-mean-token-sum-norm``. None: the length of a padded sequence in tokens.

    Raises:
        ValueError: The mode is unknown.
    """
    match loss_agg_mode:
        case "token-mean":
            return masked_mean(values, mask)
        case "seq-mean-token-sum":
            return masked_sum(values, mask, -1).mean()
        case "seq-mean-token-mean":
            return masked_mean(values, mask, -1).mean()
        case "seq-mean-token-sum-norm":
            return masked_sum(values, mask) / ((mask.shape[-1] if normalizer is None else normalizer) + SMALL)
    raise ValueError(
        f"loss_agg_mode is {loss_agg_mode!r}, wanted token-mean, seq-mean-token-sum, seq-mean-token-mean or "
        "seq-mean-token-sum-norm"
    )


def prefix_metrics(
    src_metrics: Mapping[str, Any], prefix: str, dst_metrics: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the metrics under ``prefix/name``, added to ``dst_metrics`` if it is not None."""
    result = {} if dst_metrics is None else dst_metrics
    result.update({f"{prefix}/{name}": value for name, value in src_metrics.items()})
    return result
