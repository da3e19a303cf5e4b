"""Sends the lines of a run's metrics file to trackers, the services that collect metrics, and records the progress."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry.metrics import LINE_FIELDS, METRICS_FILE
from trinity_mq.telemetry.tail import Tail

log = structlog.get_logger(__name__)

FOLDER = "trackers"
"""Subfolder of the run folder for the local files of services and for the progress of sending."""
STATE_FILE = "sent.json"
"""File below the run's ``trackers`` folder. It maps each service to its run id and the number of metrics bytes sent."""


class TrackerError(Exception):
    """A service is not installed or does not accept metrics. The message states the remedy."""


class Tracker(Protocol):
    """Interface of a client that sends the metrics of our run to one service, as a run there. Steps may arrive in any
    order, and the same values may arrive twice.
    """

    kind: str
    """Name of the service."""

    def begin(self, run_id: str) -> str:
        """Start a run at the service, or resume its run ``run_id``. Return the id of the run at the service.

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
        """Wait until everything is sent, end the run at the service and return its location (a URL or path).

        Raises:
            TrackerError: The service did not accept everything.
        """


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


class Forwarder:
    """Sends the new metrics lines of a run to each service. The progress is stored in a file, so another process can
    continue. Lines sent just before a kill are sent again.

    Args:
        folder: The run's folder.
        trackers: The services.

    Raises:
        TrackerError: The progress file cannot be parsed.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker]) -> None:
        self._folder, self._trackers = folder, list(trackers)
        self._progress = ProgressFile(folder, STATE_FILE, "metrics")
        try:
            self._state: dict[str, dict[str, Any]] = {
                kind: {"id": str(entry["id"]), "offset": int(entry["offset"])}
                for kind, entry in self._progress.load().items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._progress.invalid(error) from error
        self._begun: set[str] = set()
        self.problems: dict[str, str] = {}
        """The reason why the last send to a service failed, by service."""

    def send(self) -> None:
        """Send the new complete lines to each service. After a failure the next call retries; other services are not
        affected.
        """
        for tracker in self._trackers:
            state = self._state.setdefault(tracker.kind, {"id": "", "offset": 0})
            tail = Tail(self._folder / METRICS_FILE, state["offset"])
            try:
                if tracker.kind not in self._begun:
                    state["id"] = tracker.begin(state["id"])
                    self._begun.add(tracker.kind)
                for line in tail.read():
                    _send(tracker, line)
                self.problems.pop(tracker.kind, None)
            except TrackerError as error:
                self._note(tracker, error)
            state["offset"] = tail.offset
            self._progress.save(self._state)

    def finish(self) -> list[str]:
        """Send the rest and end the run at each service. Return the location of the run at each service where it
        has begun and was ended.
        """
        self.send()
        locations = []
        for tracker in self._trackers:
            if tracker.kind in self._begun:
                try:
                    locations.append(tracker.finish())
                except TrackerError as error:
                    self._note(tracker, error)
        return locations

    def _note(self, tracker: Tracker, error: TrackerError) -> None:
        if self.problems.get(tracker.kind) != str(error):
            log.warning("metrics_not_sent", to=tracker.kind, reason=str(error))
        self.problems[tracker.kind] = str(error)


def _send(tracker: Tracker, line: bytes) -> None:
    try:
        fields = json.loads(line)
        step, seconds = int(fields["step"]), float(fields["time"])
    except (ValueError, KeyError, TypeError):
        return  # partial line of a killed writer
    values = {
        name: float(value)
        for name, value in fields.items()
        if name not in LINE_FIELDS and isinstance(value, int | float) and math.isfinite(value)
    }
    if values:
        tracker.log(step, seconds, values)
