"""Losses of pairs: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import Pair


def pair_loss(view: TokenView, args: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, ``[pairs]``, and sums over pairs.

    DPO (arXiv 2305.18290, equation 7) with label smoothing is ``-(1 - s) log sigmoid(z) - s log sigmoid(-z)``. Here
    ``z`` is ``beta`` times the difference of ``sum_t log(pi / ref)`` between the chosen and the rejected answer. IPO
    (arXiv 2310.12036) is ``(m - 1 / (2 beta))^2`` with the difference ``m`` of the means over tokens.

    Args:
        view: Tokens of the pairs: segments 0 and 1 are the chosen and the rejected answer of pair 0, and so on.
        args: Form and parameters of the loss.

    Returns:
        The losses; sums ``chosen_reward`` and ``rejected_reward`` (``beta`` times the log ratio), ``accuracy``,
        ``margin``.
    """
    assert view.ref is not None
    if view.segments % 2:
        raise ValueError(f"{view.segments} sequences, wanted a chosen and a rejected sequence of each pair")
    log_ratio = view.logprob - view.ref
    sums = log_ratio.new_zeros(view.segments).index_add(0, view.segment, log_ratio)
    if args.form == "ipo":
        lengths = log_ratio.new_zeros(view.segments).index_add(0, view.segment, log_ratio.new_ones(view.tokens))
        means = sums / lengths
        losses = (means[::2] - means[1::2] - 1 / (2 * args.beta)).square()
    else:
        margin = args.beta * (sums[::2] - sums[1::2])
        losses = -(1 - args.label_smoothing) * logsigmoid(margin) - args.label_smoothing * logsigmoid(-margin)
    chosen, rejected = args.beta * sums[::2].detach(), args.beta * sums[1::2].detach()
    return losses, {
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
    }
