"""The canary: whether an engine's logprobs of a fixed prompt show the weights it was given.

Two questions, since two implementations never agree to the last bit:

* *Is it near?* No logprob may differ from the trainer's by more than ``largest``. In float32 that is all there is to
  ask: the two differ by 1e-6, an optimizer step shows as more than 1e-4. In bfloat16 sound sides differ by some
  hundredths, as much as a small step makes.
* *Has it moved?* With ``b`` what the trainer's logprobs have changed by since the engine was last found sound, and
  ``a`` what the engine's have, the least-squares share of the change that has arrived, ``s = <a, b> / <b, b>``, is 1
  for an engine that holds the new weights and 0 for one that has kept the old. Below one half it is nearer to the old.
  The rounding errors of each side cancel in differences of a shallow model; in a deep one they are new with every
  version. If what does not cancel has deviation ``d`` per token, ``s`` over ``k`` tokens has the deviation
  ``d / |b|``; so that a sound engine is called stale less than once in 10 000 rounds (4 deviations), ``s`` is only
  asked where the root mean square of ``b`` is at least ``8 d / sqrt(k)``. A smaller change stays in ``b``: it is judged
  once it has added up. ``d`` has a least value by the dtype. Beyond that it is measured, as the deviation of the
  residuals ``a - s b``, and ``16 d / sqrt(k)`` is asked for: these errors are also in ``b``, which makes ``s`` smaller
  by up to ``k / (2 * 16^2)``, for 64 tokens an eighth. It has a greatest value as well: an engine with a part of the
  new weights has large residuals, too.

The trainer computes in the dtype of the weights, not in float32: of weights that came in bfloat16 the small changes of
the first steps are not seen by an engine until they are above rounding, and the trainer must not expect them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_mq.models.engines.generation.text import TextCodec, TextError

PROMPT = (
    "The sun rises in the east and sets in the west. A week has seven days, and a year has twelve months. Water "
    "freezes at low temperatures and boils at high ones. Two plus three is five, and ten minus four is six. The "
    "capital of France is Paris, which lies on the river Seine."
)
"""The canary prompt: a text that a language model finds likely. Rare tokens, such as the special ones, have logprobs
around -20 that bfloat16 changes by several units in a trained model."""
LEAST_TOKENS = 16
"""Fewer tokens of :data:`PROMPT` are too few to judge by: a vocabulary without most of its words."""
FIRST_IDS = tuple(2 + n * n % 6 for n in range(24))
"""The canary where the vocabulary cannot write :data:`PROMPT`: ids that every vocabulary has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tolerated difference between two sides with the same weights."""

    largest: float
    """Tolerated difference of one logprob."""
    unsteady: float
    """Least deviation ``d``, per token, of what a difference between two versions leaves of the rounding error."""
    most_unsteady: float
    """Greatest ``d``: larger residuals are no rounding errors."""


LIMITS = {"float32": Limits(1e-4, 2e-6, 2e-5), "bfloat16": Limits(1.0, 0.02, 0.15)}
"""By dtype of the weights. Seen on tiny models: float32 2e-6 and less; bfloat16 0.01 and, of differences, 0.004 where
weights are spread as at the start of most models, 0.08 and 0.02 where they are spread four times as wide. Seen on a
trained model of 30 layers (SmolLM2-135M) in bfloat16: 0.33, and of differences 0.05 to 0.08."""
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
        arrived = arrived_share(moved, expected, self._limits.unsteady, self._limits.most_unsteady)
        if arrived is None:
            return None
        if not arrived >= HALF:
            return f"logprobs moved by {arrived:.0%} of what the new weights make: it holds older ones"
        self._sound[member] = (life, list(theirs), list(ours))
        return None


def arrived_share(
    moved: Sequence[float], expected: Sequence[float], unsteady: float, most_unsteady: float = 0.0
) -> float | None:
    """Return which share of the change ``expected`` there is in ``moved``; None where it is too small to say.

    Args:
        moved: ``a``, of the engine; see the module.
        expected: ``b``, of the trainer.
        unsteady: Least deviation ``d`` of the rounding error.
        most_unsteady: Greatest ``d``; below ``unsteady`` the residuals are not looked at.
    """
    square = math.fsum(b * b for b in expected)
    # the root mean square of b at least 8 d / sqrt(k), both sides times sqrt(k)
    if not expected or math.sqrt(square) < 8 * unsteady:
        return None
    share = math.fsum(a * b for a, b in zip(moved, expected, strict=True)) / square
    residuals = math.fsum((a - share * b) ** 2 for a, b in zip(moved, expected, strict=True))
    deviation = math.sqrt(residuals / max(1, len(expected) - 1))
    return None if math.sqrt(square) < 16 * min(deviation, most_unsteady) else share


def differences(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(now, before, strict=True)]


def canary_tokens(codec: TextCodec) -> tuple[int, ...]:
    """Return the token ids of the canary prompt for a model with this tokenizer, at least 16."""
    try:
        tokens = codec.encode(PROMPT)
    except TextError:
        tokens = []
    return tuple(tokens) if len(tokens) >= LEAST_TOKENS else FIRST_IDS
