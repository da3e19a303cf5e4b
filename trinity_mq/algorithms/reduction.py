"""Reduction as a scale for each token, made from counts of the whole optimizer step before any forward pass.

Micro-batches and ranks then only add up: ``sum_t loss_t scale_t`` over all of them is the reduced loss, however they
are cut. Sequences without a trained token count nowhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trinity_mq.config.algorithm.pieces import Reduction

Counts = npt.NDArray[np.int64]


def sequence_scales(counts: Counts, prompts: Counts, reduction: Reduction) -> npt.NDArray[np.float64]:
    """Return what each token of a sequence is multiplied by, ``[sequences]``; 0 for a sequence without trained tokens.

    Args:
        counts: Trained tokens of each sequence of the optimizer step.
        prompts: A number for the task of each, equal for sequences of one task.
        reduction: The mode.
    """
    trained = counts > 0
    sequences, tokens = int(trained.sum()), int(counts.sum())
    if not tokens:
        return np.zeros(len(counts))
    match reduction.kind:
        case "token":
            each = np.full(len(counts), 1 / tokens)
        case "token_sum":
            each = np.ones(len(counts))
        case "sequence":
            each = 1 / (sequences * np.maximum(counts, 1))
        case "sequence_sum":
            each = np.full(len(counts), 1 / sequences)
        case "sequence_constant":
            each = np.full(len(counts), 1 / (sequences * (reduction.constant or 1.0)))
        case "constant":
            each = np.full(len(counts), 1 / (reduction.constant or 1.0))
        case "prompt":
            _, numbers = np.unique(prompts, return_inverse=True)
            by_prompt = np.bincount(numbers, weights=counts)
            each = 1 / (np.count_nonzero(by_prompt) * np.maximum(by_prompt[numbers], 1))
    return np.where(trained, each, 0.0)
