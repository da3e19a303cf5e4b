"""Reward 1 for the mathematically right answer."""

from __future__ import annotations

from trinity_mq.rewards.math.answers import correct


def accuracy_reward(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    """Return accuracy 1 if ``response`` states the answer that ``truth`` states (:func:`answers.correct`), else 0."""
    return {"accuracy": float(correct(response, truth, finished=finished))}
