"""The interface of a tracker, a service that collects metrics, and the progress of sending to services."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trinity_mq.runtime.process import write_atomic

FOLDER = "trackers"
"""Subfolder of the run folder for the local files of services and for the progress of sending."""


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


class ProgressFile:
    """A JSON file that records how much of a run was sent, so that another process can continue.

    Args:
        folder: The run's folder.
        name: Name of the file.
        content: The sent data, for errors: ``metrics`` or ``spans``.
    """

    def __init__(self, folder: Path, name: str, content: str) -> None:
        self._path, self._content = folder / FOLDER / name, content

    def load(self) -> dict[str, Any]:
        """Return the recorded progress, empty if nothing was sent.

        Raises:
            TrackerError: The file is not a JSON object.
        """
        try:
            progress = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise self.invalid(error) from error
        if not isinstance(progress, dict):
            raise self.invalid(progress)
        return progress

    def save(self, progress: Mapping[str, Any]) -> None:
        """Replace the recorded progress."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(progress).encode())

    def invalid(self, reason: object) -> TrackerError:
        """Return the error that the file has invalid content, with the remedy."""
        problem = f"{self._path} is not a valid record of the {self._content} sent so far ({reason!r})"
        return TrackerError(f"{problem}: remove it to send all again")
