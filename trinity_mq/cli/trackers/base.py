"""The interface of a service that collects metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class TrackerError(Exception):
    """A service is not installed or does not take metrics; the message says what to do."""


class Tracker(Protocol):
    """One run at one service. Steps may come in any order, and the same values twice."""

    kind: str
    """Name of the service."""

    def begin(self, run_id: str) -> str:
        """Begin a run, or go on with the one of this id; return its id.

        Args:
            run_id: What an earlier call returned; empty: there was none.

        Raises:
            TrackerError: The service does not answer, or knows us not.
        """

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send finite values of a step, measured at ``seconds`` since 1970.

        Raises:
            TrackerError: They were not taken.
        """

    def finish(self) -> str:
        """Wait until all is sent, end the run, and return where it can be seen."""
