"""The canary checks that an engine's logprobs of a fixed prompt match the weights it was sent.

Two implementations never agree to the last bit, so the check has two parts:

* *Are the logprobs near?* No logprob may differ from the trainer's by more than ``largest``. In float32 this part is
  enough: the two sides differ by 1e-6, and an optimizer step changes logprobs by more than 1e-4. In bfloat16 two sides
  with the same weights differ by some hundredths, as much as the change of a small step.
* *Have the logprobs moved?* Let ``b`` be the change of the trainer's logprobs since the engine was last found sound,
  and ``a`` the change of the engine's logprobs. The least-squares share of the change that has arrived is ``s = <a, b>
  / <b, b>``. It is 1 for an engine with the new weights and 0 for an engine that kept the old weights. Below one half
  the engine is nearer to the old weights. In a shallow model the rounding errors of each side cancel in differences; in
  a deep model every version has new errors. Let ``d`` be the deviation per token of the errors that do not cancel. Over
  ``k`` tokens ``s`` then has the deviation ``d / |b|``. A sound engine must be called stale less than once in 10 000
  rounds (4 deviations), so ``s`` is only evaluated if the root mean square of ``b`` is at least ``8 d / sqrt(k)``. A
  smaller change stays in ``b`` and is judged once it has accumulated. ``d`` has a minimum that depends on the dtype.
  Above the minimum ``d`` is measured, as the deviation of the residuals ``a - s b``, and ``16 d / sqrt(k)`` is
  required: these errors are also in ``b``, which lowers ``s`` by up to ``k / (2 * 16^2)``, an eighth for 64 tokens.
  ``d`` also has a maximum, because an engine with only a part of the new weights has large residuals too.

The trainer computes in the dtype of the weights, not in float32. Weights sent in bfloat16 do not show the small changes
of the first steps until the changes exceed rounding, so the trainer must not expect to see them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_mq.engines.generation.text import TextCodec, TextError

PROMPT = (
    "The sun rises in the east and sets in the west. A week has seven days, and a year has twelve months. Water "
    "freezes at low temperatures and boils at high ones. Two plus three is five, and ten minus four is six. The "
    "capital of France is Paris, which lies on the river Seine."
)
"""The canary prompt: a text that a language model finds likely. Rare tokens, such as special tokens, have logprobs
around -20, which bfloat16 changes by several units in a trained model.
"""
LEAST_TOKENS = 16
"""Minimum number of tokens of :data:`PROMPT`. A shorter encoding means that the vocabulary lacks most of its words."""
FIRST_IDS = tuple(2 + n * n % 6 for n in range(24))
"""Canary tokens for a vocabulary that cannot encode :data:`PROMPT`: ids that every vocabulary has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tolerated differences between two sides with the same weights."""

    largest: float
    """Maximum difference of one logprob."""
    unsteady: float
    """Minimum of ``d``: deviation, per token, of the rounding error in the difference between two versions."""
    most_unsteady: float
    """Maximum of ``d``. Larger residuals are not rounding errors."""


LIMITS = {"float32": Limits(1e-4, 2e-6, 2e-5), "bfloat16": Limits(1.0, 0.02, 0.15)}
"""Limits by dtype of the weights; another dtype has the limits of float32. Measured on tiny models: at most 2e-6 in
float32. In bfloat16 0.01, and 0.004 for differences between versions, with the usual initial spread of weights; 0.08
and 0.02 with four times this spread. Measured on a trained model of 30 layers (SmolLM2-135M) in bfloat16: 0.33, and
0.05 to 0.08 for differences."""
HALF = 0.5


class Canary:
    """Judges the engines of one trainer."""

    def __init__(self, dtype: str) -> None:
        self._limits = LIMITS.get(dtype, LIMITS["float32"])
        self._sound: dict[str, tuple[str, list[float], list[float]]] = {}
        """Process id, logprobs and trainer logprobs at the last sound check, by engine."""

    def problem(self, member: str, life: str, theirs: object, ours: Sequence[float]) -> str | None:
        """Return the reason why the logprobs ``theirs`` of ``member`` do not match the weights behind ``ours``; None if
        they match, or if they are near and the change is too small to judge.

        Args:
            member: Id of the engine.
            life: Id of its process. A new process is judged without history.
            theirs: Content of the engine's answer, unchecked.
            ours: The trainer's logprobs under the weights that the engine was sent.
        """
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            return f"{len(ours)} logprobs wanted, got {theirs!r:.80}"
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in theirs):
            return f"its logprobs are not finite numbers: {theirs!r:.80}"
        worst = max((abs(a - b) for a, b in zip(theirs, ours, strict=True)), default=0.0)
        if not worst <= self._limits.largest:
            return f"logprobs differ by {worst:.2e}, allowed {self._limits.largest:.0e}"
        sound_life, theirs_before, ours_before = self._sound.get(member, ("", [], []))
        if sound_life != life or len(ours_before) != len(ours):
            self._sound[member] = (life, list(theirs), list(ours))
            return None
        moved, expected = differences(theirs, theirs_before), differences(ours, ours_before)
        arrived = arrived_share(moved, expected, self._limits.unsteady, self._limits.most_unsteady)
        if arrived is None:
            return None
        if not arrived >= HALF:
            return f"logprobs moved by {arrived:.0%} of the change of the new weights: the engine holds older weights"
        self._sound[member] = (life, list(theirs), list(ours))
        return None


def arrived_share(
    moved: Sequence[float], expected: Sequence[float], unsteady: float, most_unsteady: float = 0.0
) -> float | None:
    """Return the share of the change ``expected`` that arrived in ``moved``; None if the change is too small to judge.

    Args:
        moved: ``a``, from the engine; see the module docstring.
        expected: ``b``, from the trainer.
        unsteady: Minimum deviation ``d`` of the rounding error.
        most_unsteady: Maximum ``d``. Below half of ``unsteady`` the residuals have no effect.
    """
    square = math.fsum(b * b for b in expected)
    # root mean square of b at least 8 d / sqrt(k), with both sides multiplied by sqrt(k)
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
