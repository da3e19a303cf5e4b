"""Data metrics of a train step: answer lengths, token age, and share of imitated answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trinity_mq.algorithms.estimators.runs import is_finite, scores
from trinity_mq.algorithms.mismatch import AGES, age_mask
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Indexes
from trinity_mq.experience.rules import DPO, RESPONSE_TRUNCATED
from trinity_mq.training.packing import IMITATED, SAMPLED, StepTokens


def tokens_of(batch: ExperienceBatch) -> Indexes:
    """Return the token count of each experience. A pair counts both answers."""
    lengths = [np.maximum(batch.lengths(name), 0) for name in ("tokens", "chosen", "rejected")]
    total: Indexes = lengths[0] + lengths[1] + lengths[2]
    return total


def length_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """Return the lengths of prompts and answers in tokens. The answers of a pair count only in the mean.

    An answer is right if its :func:`scores` is above 0. Every other answer with a score is wrong.

    Args:
        batch: At least one experience.
    """
    sizes, prompts = tokens_of(batch), batch.prompt_lengths()
    pairs = np.array([kind == DPO for kind in batch.values("experience_type")], dtype=bool)
    metrics = {
        "prompt_length/mean": int(prompts.sum()) / len(batch),
        "response_length/mean": int(sizes.sum() - prompts.sum()) / (len(batch) + int(pairs.sum())),
    }
    if pairs.all():
        return metrics
    lengths = (sizes - prompts)[~pairs]
    cut = np.array([status == RESPONSE_TRUNCATED for status in batch.values("truncate_status")], dtype=bool)[~pairs]
    metrics |= {"response_length/max": float(lengths.max()), "response_length/clipped_frac": float(cut.mean())}
    finite_scores = [score if is_finite(score) else np.nan for score in scores(batch)]
    values = np.array(finite_scores, dtype=np.float64)[~pairs]
    for name, chosen in (("right", values > 0), ("wrong", values <= 0)):
        if chosen.any():
            metrics[f"response_length/{name}/mean"] = float(lengths[chosen].mean())
    return metrics


def token_metrics(tokens: StepTokens, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the number of trained tokens and the age of the sampled tokens in train steps. Where answers are imitated,
    also return their share of the sequences and the weight of their loss component.

    Args:
        tokens: Tokens of the train step.
        weights: Weights of the loss components.
    """
    metrics = {"data/trained_tokens": float(tokens.tokens)}
    if "ce" in weights and len(tokens.role):
        metrics |= {"data/expert_frac": float((tokens.role == IMITATED).mean()), "data/mu": weights["ce"]}
    ages = tokens.columns["staleness"][torch.from_numpy(np.repeat(tokens.role == SAMPLED, tokens.counts))]
    if len(ages):
        shares = {name: age_mask(ages, name).float().mean() for name in AGES}
        staleness = {"mean": ages.float().mean(), "max": ages.max(), **shares}
        metrics |= {f"sample/staleness/tokens/{name}": float(value) for name, value in staleness.items()}
    return metrics
