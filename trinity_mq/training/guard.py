"""Guard of the policy's optimizer steps. It decides which steps are skipped and when training stops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from trinity_mq.config.agents import GuardConfig
from trinity_mq.runtime.errors import FatalError

HISTORY = 100
"""Number of gradient norms of applied optimizer steps that the guard remembers."""
LEAST_HISTORY = 20
"""Minimum number of remembered norms for the comparison of a new norm with them."""

Reason = Literal["nonfinite_loss", "nonfinite_norm", "norm_spike", "mismatch"]

ADVICE: Mapping[Reason, str] = {
    "nonfinite_loss": "rewards, advantages or logprobs of the batch may be out of range, or the weights damaged",
    "nonfinite_norm": "the learning rate may be too high, or the weights damaged: resume from an earlier checkpoint",
    "norm_spike": "raise trainer.guard.max_norm_ratio if such gradients are to be expected",
    "mismatch": "engine and trainer disagree about the same weights: compare their dtypes and versions, or raise "
    "trainer.guard.max_mismatch",
}


class TrainingStopped(FatalError):
    """Too many optimizer steps in a row were skipped. The batch of the last train step is not acknowledged."""


def skip_reason(
    settings: GuardConfig, norms: Sequence[float], *, loss: float, norm: float, mismatch: float | None
) -> Reason | None:
    """Return the reason to skip an optimizer step, or None to apply it.

    Args:
        settings: Limits of the guard.
        norms: Gradient norms of the previous applied steps.
        loss: Loss of the step.
        norm: Gradient norm of the step, before clipping.
        mismatch: ``mismatch/k3`` in nats; None if it is unknown, or if the train step has already changed the weights.
    """
    if not math.isfinite(loss):
        return "nonfinite_loss"
    if not math.isfinite(norm):
        return "nonfinite_norm"
    largest = settings.max_norm_ratio
    if largest is not None and len(norms) >= LEAST_HISTORY and norm > largest * median(norms):
        return "norm_spike"
    if settings.max_mismatch is not None and mismatch is not None and mismatch > settings.max_mismatch:
        return "mismatch"
    return None


class Guard:
    """Judges the optimizer steps of a run in sequence."""

    def __init__(self, settings: GuardConfig, state: Mapping[str, Any] | None = None) -> None:
        """Resume from a state, see :meth:`state`. Without a state, begin as at the start of a run."""
        self.settings = settings
        state = state or {}
        self._norms: list[float] = list(state.get("norms", ()))
        self._skipped: list[Reason] = list(state.get("skipped", ()))

    def state(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint: norms of the last applied steps, and reasons of the steps skipped
        since.
        """
        return {"norms": list(self._norms), "skipped": list(self._skipped)}

    def judge(self, *, loss: float, norm: float, mismatch: float | None = None) -> Reason | None:
        """Return the reason to skip the next step, or None to apply it; see :func:`skip_reason`.

        Raises:
            TrainingStopped: ``max_consecutive_skips`` steps in a row were skipped.
        """
        reason = skip_reason(self.settings, self._norms, loss=loss, norm=norm, mismatch=mismatch)
        if reason is None:
            self._norms = [*self._norms, norm][-HISTORY:]
            self._skipped = []
            return None
        limit = self.settings.max_consecutive_skips
        self._skipped = [*self._skipped, reason][-(limit or HISTORY) :]
        if limit is not None and len(self._skipped) >= limit:
            raise TrainingStopped(self._stop_message(norm, loss, mismatch))
        return reason

    def _stop_message(self, norm: float, loss: float, mismatch: float | None) -> str:
        counts = ", ".join(f"{reason} {count}" for reason, count in Counter(self._skipped).items())
        usual = f", median of the last {len(self._norms)} applied ones {median(self._norms):.3g}" if self._norms else ""
        mismatch_note = "" if mismatch is None else f", mismatch/k3 {mismatch:.3g}"
        return (
            f"{len(self._skipped)} optimizer steps in a row were skipped ({counts}), and "
            f"trainer.guard.max_consecutive_skips is {self.settings.max_consecutive_skips}. The last had loss "
            f"{loss:.3g}, gradient norm {norm:.3g}{usual}{mismatch_note}. {ADVICE[self._skipped[-1]].capitalize()}. "
            "To leave such batches out and continue, set trainer.guard.max_consecutive_skips=null"
        )
