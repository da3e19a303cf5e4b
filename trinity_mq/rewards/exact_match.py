"""Reward 1 for the right text, else 0."""

from __future__ import annotations


def exact_match(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    """Return accuracy 1 if ``response`` is ``truth`` but for white space around it, and ended by itself; else 0."""
    return {"accuracy": float(finished and truth is not None and response.strip() == truth.strip())}
