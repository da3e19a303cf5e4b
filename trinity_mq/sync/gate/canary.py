"""The canary: whether an engine's logprobs of a fixed prompt show the weights it was given.

Two questions, since two implementations never agree to the last bit:

* *Is it near?* No logprob may differ from the trainer's by more than ``largest``. In float32 that is all there is to
  ask: the two differ by 1e-6, an optimizer step shows as more than 1e-4. In bfloat16 sound sides differ by some
  hundredths, as much as a small step makes.
* *Has it moved?* The rounding error of one engine on one prompt hardly changes from version to version, so it cancels
  in differences. With ``b`` what the trainer's logprobs have changed by since the engine was last found sound, and
  ``a`` what the engine's have, the least-squares share of the change that has arrived, ``s = <a, b> / <b, b>``, is 1
  for an engine that holds the new weights and 0 for one that has kept the old. Below one half it is nearer to the old.
  If what does not cancel has deviation ``d`` per token, ``s`` over ``k`` tokens has the deviation ``d / |b|``; so that
  a sound engine is called stale less than once in 10 000 rounds (4 deviations), ``s`` is only asked where the root mean
  square of ``b`` is at least ``8 d / sqrt(k)``. A smaller change stays in ``b``: it is judged once it has added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Tolerated difference between two sides with the same weights."""

    largest: float
    """Tolerated difference of one logprob."""
    unsteady: float
    """Deviation, per token, of what a difference between two versions leaves of the rounding error."""


LIMITS = {"float32": Limits(1e-4, 2e-6), "bfloat16": Limits(0.5, 0.02)}
"""By dtype of the weights. Seen on tiny models: float32 2e-6 and less; bfloat16 0.01 and, of differences, 0.004 where
weights are spread as at the start of most models, 0.08 and 0.02 where they are spread four times as wide."""
HALF = 0.5


class Canary:
    """Judges the engines of one trainer."""

    def __init__(self, dtype: str) -> None:
        self._limits = LIMITS.get(dtype, LIMITS["float32"])
        self._sound: dict[str, tuple[str, list[float], list[float]]] = {}
        """By engine: its life, its logprobs and the trainer's when it was last found sound."""

    def problem(self, member: str, life: str, theirs: object, ours: Sequence[float]) -> str | None:
        """Return why the logprobs ``theirs`` of ``member`` do not show the weights that ``ours`` are of; None: they do.

        Args:
            member: The engine's id.
            life: Of its process; another one is judged anew.
            theirs: What it sent, whatever that is.
            ours: The trainer's, under the weights it was given.
        """
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            return f"{len(ours)} logprobs wanted, got {theirs!r:.80}"
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in theirs):
            return f"its logprobs are no numbers: {theirs!r:.80}"
        worst = max((abs(a - b) for a, b in zip(theirs, ours, strict=True)), default=0.0)
        if not worst <= self._limits.largest:
            return f"logprobs differ by {worst:.2e}, allowed {self._limits.largest:.0e}"
        known, theirs_before, ours_before = self._sound.get(member, ("", [], []))
        if known != life or len(ours_before) != len(ours):
            self._sound[member] = (life, list(theirs), list(ours))
            return None
        moved, expected = differences(theirs, theirs_before), differences(ours, ours_before)
        arrived = arrived_share(moved, expected, self._limits.unsteady)
        if arrived is None:
            return None
        if not arrived >= HALF:
            return f"logprobs moved by {arrived:.0%} of what the new weights make: it holds older ones"
        self._sound[member] = (life, list(theirs), list(ours))
        return None


def arrived_share(moved: Sequence[float], expected: Sequence[float], unsteady: float) -> float | None:
    """Return which share of the change ``expected`` there is in ``moved``; None where it is too small to say."""
    square = math.fsum(b * b for b in expected)
    # the root mean square of b at least 8 d / sqrt(k), both sides times sqrt(k)
    if not expected or math.sqrt(square) < 8 * unsteady:
        return None
    return math.fsum(a * b for a, b in zip(moved, expected, strict=True)) / square


def differences(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(now, before, strict=True)]
