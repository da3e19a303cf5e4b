"""Reward 1 for the mathematically right answer, and something for its form."""

from __future__ import annotations

from trinity_mq.rewards.format_reward import Form, has_form
from trinity_mq.rewards.math.accuracy import accuracy_reward


def math_reward(
    response: str, truth: str | None, *, finished: bool, format_score: float = 0.0, form: Form = "think_answer"
) -> dict[str, float]:
    """Return accuracy 1 or 0 and, unless ``format_score`` is 0, that score for the right ``form``, else minus it.

    The two parts and the sizes 1 and 0.1 are those of Trinity-RFT's reward of this name; there the form counts by
    default.
    """
    parts = accuracy_reward(response, truth, finished=finished)
    if format_score:
        parts["format_score"] = format_score if finished and has_form(response, form) else -format_score
    return parts
