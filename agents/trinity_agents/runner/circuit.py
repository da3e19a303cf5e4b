"""Circuit breaker of a runner's lane, for the sandboxes and services that slices use.

A closed circuit lets every slice start. The circuit opens after a number of infrastructure failures in a row, and no
slice starts during a pause. After the pause it is half-open: one slice is tried as a probe. If a run of the probe, or
of any other slice, finishes, the circuit closes; if the probe fails in the same way, the next pause is twice as long.
No I/O: callers pass the time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from trinity_mq.config import CircuitBreakerConfig
from trinity_mq.messages import INFRASTRUCTURE, Lane, PausedLane
from trinity_mq.rollout.status import SliceOutcome

PAUSE = 5.0
"""Seconds of the first pause: long enough for a service that restarts, short next to a batch."""
MAX_PAUSE = 300.0
"""Seconds of the longest pause: a run resumes within five minutes after an outage of any length."""
MAX_TRIES = 16
"""Maximum number of infrastructure failures of one slice, counted over all runners. With the pauses above they take
about 50 minutes if the same slice is tried after each pause.
"""
LONE_ROW = 3
"""Number of failures in a row that open the circuit if all belong to the same slice (the slice fails alone). If
``runner.circuit_breaker.failures`` is lower, it applies instead."""
OWN_FAULTS = 2
"""Number of failed retries of a slice after which the slice itself is to blame. Only a retry counts before which
another slice has succeeded since the failure. A single such retry may be due to a sandbox that is only sometimes
available.
"""
REMEMBERED = 10_000
"""Maximum number of requeued slices remembered; another runner may have taken a requeued slice."""
NO_EVIDENCE = frozenset({"timeout", "engine", "process", "stopped"})
"""Kinds of failures that neither extend nor reset the row of failures."""


class CircuitBreaker:
    """The circuit breaker of one lane of a runner. Times are seconds of the same monotonic clock.

    Args:
        config: Limits of the circuit breaker.
        max_pause: Seconds of the longest pause.
        max_tries: Maximum number of infrastructure failures of one slice.
    """

    def __init__(
        self, config: CircuitBreakerConfig, *, max_pause: float = MAX_PAUSE, max_tries: int = MAX_TRIES
    ) -> None:
        self._config, self._max_pause, self._max_tries = config, max_pause, max_tries
        self._until: float | None = None
        """Time at which the pause ends; None while the circuit is closed."""
        self._pause = 0.0
        self._probe: Hashable | None = None
        self._failure_row = 0
        self._failing_slices: dict[Hashable, None] = {}
        """Slices that failed in this row; at most two are stored, which is enough to see that no slice fails alone."""
        self._kind = self._reason = ""
        self._last_success = -math.inf
        self._requeued: dict[Hashable, tuple[float, int]] = {}
        """(time of the last failure in this runner, number of failed retries before which another slice had succeeded),
        by requeued slice."""
        self.pauses = 0
        """Number of times that the circuit opened."""
        self.probes = 0
        """Number of probes that have ended, with any result."""

    @property
    def is_closed(self) -> bool:
        """Whether every slice may be started."""
        return self._until is None

    def admits(self, now: float) -> bool:
        """Return whether a slice may be started."""
        return self._until is None or (self._probe is None and now >= self._until)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until a slice may be started, 0 if it may now; None while a probe is running, whose result
        decides.
        """
        return None if self._probe is not None else 0.0 if self._until is None else max(0.0, self._until - now)

    def begin(self, slice_key: Hashable, now: float) -> bool:
        """Return whether the slice may be started. If it may, and the circuit is not closed, the slice becomes the
        probe.
        """
        if not self.admits(now):
            return False
        if self._until is not None:
            self._probe = slice_key
        return True

    def end(self, slice_key: Hashable, outcome: SliceOutcome | None, put_back: int, now: float) -> bool:
        """Record the result of an attempt of a slice; return whether to retry the slice later.

        A slice is retried after an infrastructure failure (:func:`is_infrastructure`), with two exceptions. While the
        circuit is closed, it is not retried if other slices succeeded between its attempts on this runner
        :data:`OWN_FAULTS` times, or once if it fails alone: then the slice itself is to blame, and its failure does not
        count for the lane. It is also not retried at its limit of attempts, which is lower if it fails alone.

        Args:
            slice_key: The slice.
            outcome: The result; None if it is unknown, for example if the slice was cancelled, or already recorded.
            put_back: Number of earlier infrastructure failures of the slice on any runner.
            now: Current time in seconds.
        """
        was_probe = self._probe is not None and self._probe == slice_key
        if was_probe:
            self._probe = None
            self.probes += 1
        if not self._config.enable or outcome is None:
            return False
        if outcome.runs:
            self._last_success = now
            self._until, self._pause, self._probe = None, 0.0, None
            self._break_row()
        elif is_infrastructure(outcome):
            return self._fail(slice_key, outcome, put_back + 1, now, was_probe)
        elif outcome.failure_kind not in {*NO_EVIDENCE, *INFRASTRUCTURE} and self.is_closed:
            self._break_row()
        self._requeued.pop(slice_key, None)
        return False

    def status(self, lane: Lane, now: float) -> PausedLane | None:
        """Return the lane's status for the heartbeats; None if a slice may be started."""
        return None if self.admits(now) else self.describe(lane)

    def describe(self, lane: Lane) -> PausedLane | None:
        """Return the reason why the circuit is not closed, None for a closed circuit."""
        if self._until is None:
            return None
        return PausedLane(
            lane=lane, failures=self._failure_row, kind=self._kind, reason=self._reason, pause=self._pause
        )

    def _fail(self, slice_key: Hashable, outcome: SliceOutcome, tries: int, now: float, was_probe: bool) -> bool:
        """Record an infrastructure failure; return whether to retry the slice."""
        last, own_faults = self._requeued.pop(slice_key, (math.inf, 0))
        own_faults += self._last_success > last
        self._failure_row += 1
        if len(self._failing_slices) < 2:
            self._failing_slices[slice_key] = None
        self._kind, self._reason = outcome.failure_kind or "", outcome.message or ""
        alone = len(self._failing_slices) == 1 and self._failure_row >= LONE_ROW
        if self.is_closed and own_faults >= (1 if alone else OWN_FAULTS):
            self._failure_row -= 1
            if alone:
                self._break_row()
            return False
        if self._until is None:
            if self._failure_row >= (min(LONE_ROW, self._config.failures) if alone else self._config.failures):
                self.pauses += 1
                self._pause = PAUSE
                self._until = now + self._pause
        elif was_probe:
            self._pause = min(2 * self._pause, self._max_pause)
            self._until = now + self._pause
        if tries >= (self._config.tries_alone if alone else self._max_tries):
            if alone and self._until is not None:
                self._pause, self._until = PAUSE, now  # the pause was due to this slice only
            return False
        self._requeued[slice_key] = now, own_faults
        if len(self._requeued) > REMEMBERED:
            del self._requeued[next(iter(self._requeued))]
        return True

    def _break_row(self) -> None:
        self._failure_row = 0
        self._failing_slices.clear()


def is_infrastructure(outcome: SliceOutcome) -> bool:
    """Return whether no run of a slice finished because of an infrastructure failure that a retry may fix."""
    return not outcome.runs and outcome.failure_kind in INFRASTRUCTURE and outcome.retryable
