r"""A small reward for the form of a response, whatever it says."""

from __future__ import annotations

from trinity_mq.rewards.math_answer import boxed


def format_reward(response: str, truth: str | None, *, finished: bool, score: float = 0.1) -> dict[str, float]:
    r"""Return ``score`` if ``response`` ended by itself and holds a ``\boxed{}`` with something in it, else ``-score``.

    Alone it teaches form only and reports no accuracy: add it to another reward in a function of your own.
    """
    found = boxed(response)
    return {"format_score": score if finished and found is not None and found[1].strip() else -score}
