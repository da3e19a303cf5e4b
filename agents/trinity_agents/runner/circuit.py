"""Decides whether a runner starts slices of a lane: a circuit breaker for the sandboxes and services that they use.

Closed, it lets every slice through. It opens when so many tries of slices in a row have failed for want of
infrastructure; then none is started for a while. After that it is half-open: one slice is tried. If a run of it
finishes, the circuit closes; if it fails in the same way, the next pause is twice as long. No I/O: the time is given.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from trinity_mq.config import CircuitBreakerConfig
from trinity_mq.messages import INFRASTRUCTURE, Lane, PausedLane
from trinity_mq.rollout.status import SliceOutcome

LONE_ROW = 3
"""Failures in a row at which the circuit opens where all are of one slice, which fails alone then."""
OWN_FAULTS = 2
"""Times that others go well between two tries of a slice that fails. Once may be a sandbox that comes and goes."""
REMEMBERED = 10_000
"""Slices that were put back and are remembered: another runner may have taken them."""
NO_EVIDENCE = frozenset({"timeout", "engine", "process", "stopped"})
"""Kinds of failures that neither make a row of failures longer nor break it."""


class Circuit:
    """The circuit of one lane of one runner. Times are seconds of any one clock.

    Args:
        config: Its limits.
    """

    def __init__(self, config: CircuitBreakerConfig) -> None:
        self._config = config
        self._until: float | None = None
        """End of the pause; None while the circuit is closed."""
        self._pause = 0.0
        self._probe: Hashable | None = None
        self._row = 0
        self._failing: dict[Hashable, None] = {}
        """Slices that failed in this row, at most two: more are not told apart."""
        self._kind = self._reason = ""
        self._worked = -math.inf
        self._failed: dict[Hashable, tuple[float, int]] = {}
        """By slice that was put back: when it last failed here, and how often others went well between its tries."""
        self.pauses = 0
        """Times that the circuit opened."""
        self.probes = 0
        """Probes that have ended, in whatever way."""

    @property
    def is_closed(self) -> bool:
        """Every slice may be started."""
        return self._until is None

    def admits(self, now: float) -> bool:
        """Return whether a slice may be started."""
        return self._until is None or (self._probe is None and now >= self._until)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until a slice may be started; None where that depends on the probe under way."""
        return None if self._probe is not None else 0.0 if self._until is None else max(0.0, self._until - now)

    def begin(self, slice_key: Hashable, now: float) -> bool:
        """Return whether the slice may be started; in a half-open circuit it is the probe then."""
        if not self.admits(now):
            return False
        if self._until is not None:
            self._probe = slice_key
        return True

    def end(self, slice_key: Hashable, outcome: SliceOutcome | None, tries: int, now: float) -> bool:
        """Take note of how a try of a slice ended; return whether the slice is to be tried again later.

        It is not where other slices went well between two tries of it on this runner, :data:`OWN_FAULTS` times, or once
        if it fails alone: then the fault is its own, and does not count for the lane. Nor is it at the limit of its
        tries, which is lower if it fails alone.

        Args:
            slice_key: The slice.
            outcome: None: nothing is known, as where nobody waits for the slice any more.
            tries: Its tries on any runner that failed for want of infrastructure, this one included if it did.
            now: The time.
        """
        was_probe = self._probe is not None and self._probe == slice_key
        if was_probe:
            self._probe = None
            self.probes += 1
        if not self._config.enable or outcome is None:
            return False
        if outcome.runs:
            self._worked = now
            self._until, self._pause, self._probe = None, 0.0, None
            self._break_row()
        elif is_infrastructure(outcome):
            return self._fail(slice_key, outcome, tries, now, was_probe)
        elif outcome.failure_kind not in {*NO_EVIDENCE, *INFRASTRUCTURE} and self.is_closed:
            self._break_row()
        self._failed.pop(slice_key, None)
        return False

    def status(self, lane: Lane, now: float) -> PausedLane | None:
        """Return what heartbeats say about the lane; None where a slice may be started."""
        return None if self.admits(now) else self.describe(lane)

    def describe(self, lane: Lane) -> PausedLane | None:
        """Return why the circuit is not closed, None if it is."""
        if self._until is None:
            return None
        return PausedLane(lane=lane, failures=self._row, kind=self._kind, reason=self._reason, pause=self._pause)

    def _fail(self, slice_key: Hashable, outcome: SliceOutcome, tries: int, now: float, was_probe: bool) -> bool:
        """Take note of a failure for want of infrastructure; return whether the slice is to be tried again."""
        last, own_faults = self._failed.pop(slice_key, (math.inf, 0))
        own_faults += self._worked > last
        self._row += 1
        if len(self._failing) < 2:
            self._failing[slice_key] = None
        self._kind, self._reason = outcome.failure_kind or "", outcome.message or ""
        alone = len(self._failing) == 1 and self._row >= LONE_ROW
        if self.is_closed and own_faults >= (1 if alone else OWN_FAULTS):
            self._row -= 1
            if alone:
                self._break_row()
            return False
        if self._until is None:
            if self._row >= (min(LONE_ROW, self._config.failures) if alone else self._config.failures):
                self.pauses += 1
                self._pause = self._config.pause
                self._until = now + self._pause
        elif was_probe:
            self._pause = min(2 * self._pause, self._config.max_pause)
            self._until = now + self._pause
        if tries >= (self._config.tries_alone if alone else self._config.tries):
            if alone and self._until is not None:
                self._pause, self._until = self._config.pause, now  # the others need not wait for its sake
            return False
        self._failed[slice_key] = now, own_faults
        if len(self._failed) > REMEMBERED:
            del self._failed[next(iter(self._failed))]
        return True

    def _break_row(self) -> None:
        self._row = 0
        self._failing.clear()


def is_infrastructure(outcome: SliceOutcome) -> bool:
    """Return whether none of a slice's runs finished for want of infrastructure, and a further try may go well."""
    return not outcome.runs and outcome.failure_kind in INFRASTRUCTURE and outcome.retryable
