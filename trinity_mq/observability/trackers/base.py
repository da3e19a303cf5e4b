"""The interface of a tracker, a service that collects metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class TrackerError(Exception):
    """A service is not installed or does not accept metrics. The message states the remedy."""


class Tracker(Protocol):
    """One run at one service. Steps may arrive in any order, and the same values may arrive twice."""

    kind: str
    """Name of the service."""

    def begin(self, run_id: str) -> str:
        """Start a run or resume the run ``run_id``. Return the run's id.

        Args:
            run_id: Id that an earlier call returned. Empty: start a new run.

        Raises:
            TrackerError: The service does not answer or refuses the login.
        """

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send finite values of a step, measured at ``seconds`` since the epoch.

        Raises:
            TrackerError: The service did not accept the values.
        """

    def finish(self) -> str:
        """Wait until everything is sent, end the run and return its location (a URL or path)."""
