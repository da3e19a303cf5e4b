r"""Reward for a mathematically right answer in ``\boxed{}``."""

from __future__ import annotations

from trinity_mq.rewards.format_reward import has_form
from trinity_mq.rewards.math.answers import equal, marked
from trinity_mq.rewards.math.math_answer import boxed


def math_boxed(
    response: str, truth: str | None, *, finished: bool, with_think: bool = False, format_score_coef: float = 0.1
) -> dict[str, float]:
    r"""Return accuracy 1 if the last ``\boxed{}`` holds the answer that ``truth`` states, else 0, and a format score.

    Args:
        response: The text of the response.
        truth: The bare answer, or a text that marks it (:func:`answers.marked`).
        finished: The response ended by itself; one that did not has no right form, but its box counts.
        with_think: The right form is ``<think>...</think>`` and a box behind it, else a box alone.
        format_score_coef: What a response without the right form loses: the format score is 0 or minus this, as in
            Trinity-RFT's reward of this name.
    """
    found, wanted = boxed(response), (marked(truth) or truth.strip()) if truth else ""
    right = found is not None and equal(wanted, found[1].strip())
    formed = finished and has_form(response, "think_boxed" if with_think else "boxed")
    return {"accuracy": float(right), "format_score": 0.0 if formed else -format_score_coef}
