"""A dense reward for short answers, which lets a model climb from random weights where 0 or 1 never starts."""

from __future__ import annotations

EXACT_WEIGHT = 0.5
POSITION_WEIGHT = 0.8
LENGTH_WEIGHT = 0.2


def char_match(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    """Return accuracy (exact text that ended by itself) and, where that is 0, credit for what is right.

    Their sum is ``0.5 exact + 0.5 (0.8 share of right positions + 0.2 right length and end)``: an exact answer is worth
    1, anything else at most 0.5. Measured on the arithmetic examples against 0/1 rewards.
    """
    if not truth:
        return {"accuracy": 0.0, "partial_credit": 0.0}
    if finished and response == truth:
        return {"accuracy": 1.0, "partial_credit": 0.0}
    right = sum(seen == wanted for seen, wanted in zip(response, truth, strict=False)) / len(truth)
    ended = finished and len(response) == len(truth)
    return {"accuracy": 0.0, "partial_credit": (1 - EXACT_WEIGHT) * (POSITION_WEIGHT * right + LENGTH_WEIGHT * ended)}
