"""The reduction of a loss as a scale per token, computed from counts of the whole optimizer step before any forward
pass.

Micro-batches and ranks then only sum: ``sum_t loss_t scale_t`` over all of them is the reduced loss, whatever the
division. Sequences without a trained token do not count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trinity_mq.config.algorithm.pieces import Reduction

Counts = npt.NDArray[np.int64]


def sequence_scales(counts: Counts, prompts: Counts, reduction: Reduction) -> npt.NDArray[np.float64]:
    """Return the factor of the loss of each sequence's tokens, ``[sequences]``; 0 for a sequence without trained
    tokens.

    Args:
        counts: Number of trained tokens of each sequence in the optimizer step.
        prompts: Task number of each sequence, equal for sequences of the same task.
        reduction: Mode of the reduction.
    """
    trained = counts > 0
    sequences, tokens = int(trained.sum()), int(counts.sum())
    if not tokens:
        return np.zeros(len(counts))
    match reduction.kind:
        case "token":
            scales = np.full(len(counts), 1 / tokens)
        case "token_sum":
            scales = np.ones(len(counts))
        case "sequence":
            scales = 1 / (sequences * np.maximum(counts, 1))
        case "sequence_sum":
            scales = np.full(len(counts), 1 / sequences)
        case "sequence_constant":
            scales = np.full(len(counts), 1 / (sequences * (reduction.constant or 1.0)))
        case "constant":
            scales = np.full(len(counts), 1 / (reduction.constant or 1.0))
        case "prompt":
            _, numbers = np.unique(prompts, return_inverse=True)
            by_prompt = np.bincount(numbers, weights=counts)
            scales = 1 / (np.count_nonzero(by_prompt) * np.maximum(by_prompt[numbers], 1))
    return np.where(trained, scales, 0.0)
