"""Sends the spans of a run's processes to a collector and records the progress."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from trinity_mq.bus.retry import exponential_pause
from trinity_mq.observability.spans.collector import OtlpClient, SpansRejected
from trinity_mq.observability.spans.tree import TraceTree, TreeSpan
from trinity_mq.observability.trackers.base import ProgressFile, TrackerError
from trinity_mq.telemetry.trace import TRACE_FOLDER
from trinity_mq.telemetry.trace_files import TraceTail
from trinity_mq.telemetry.trace_ids import Sampled, trace_key

log = structlog.get_logger(__name__)

STATE_FILE = "spans.json"
"""File below the run's ``trackers`` folder with the export progress."""
AT_ONCE = 1000
"""Maximum spans per request: about 50 kB, compressed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""First and longest backoff in seconds after a failed send. The backoff doubles with each failure."""


class SpanForwarder:
    """Sends the new spans of a run's processes. The progress is stored in a file, so another process can continue.
    Spans that the collector does not accept stay in the run's folder; memory holds only the spans read last, a few
    thousand per process. Spans sent just before a kill are sent again with the same ids.

    Args:
        folder: The run's folder.
        name: The run's name.
        collector: The collector.
        sample: Fraction of the batches whose spans are sent.

    Raises:
        TrackerError: The progress file cannot be parsed, or the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str, collector: OtlpClient, sample: float = 1.0) -> None:
        self._collector = collector
        self._progress = ProgressFile(folder, STATE_FILE, "spans")
        state = self._progress.load()
        try:
            (folder / TRACE_FOLDER).mkdir(parents=True, exist_ok=True)
            key = trace_key(folder / TRACE_FOLDER)
        except OSError as error:
            raise TrackerError(f"{folder / TRACE_FOLDER} cannot be used: {error.strerror or error}") from error
        try:
            self._tail = TraceTail(folder, state.get("tail"), batches=Sampled(key, sample))
            self._tree = TraceTree(name, key, sample, state.get("tree"))
            self.sent, self.lost = int(state.get("sent", 0)), int(state.get("lost", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._progress.invalid(error) from error
        self._unsent: list[TreeSpan] = []
        self._failures, self._not_before = 0, 0.0
        self.problem = ""
        """The reason why the collector did not accept the spans of the last request. Empty: it accepted them."""

    def send(self) -> None:
        """Send new spans, unless the backoff after a failure has not passed."""
        if time.monotonic() >= self._not_before:
            self._send_all()

    def finish(self, *, over: bool = True) -> None:
        """Send the remaining spans, whatever the backoff.

        Args:
            over: True if the run is over. The spans of unfinished batches are then completed and sent.
        """
        if not self._send_all() or not over:
            return
        self._unsent.extend(self._tree.finish())
        if self._send_unsent():
            self._save()

    def _send_all(self) -> bool:
        """Send all new spans. Return whether the collector accepted all of them."""
        while self._send_unsent():
            self._save()
            if (spans := self._tail.read()) is None:
                return True
            self._unsent.extend(self._tree.add(spans))
        return False

    def _send_unsent(self) -> bool:
        while chunk := self._unsent[:AT_ONCE]:
            try:
                self._collector.send(chunk)
                self.sent += len(chunk)
            except SpansRejected as error:
                self.lost += error.count
                self.sent += len(chunk) - error.count
                self._note(str(error))
            except TrackerError as error:
                self._note(str(error))
                self._failures += 1
                self._not_before = time.monotonic() + exponential_pause(FIRST_PAUSE, LONGEST_PAUSE, self._failures)
                return False
            else:
                self.problem = ""
            self._failures, self._not_before = 0, 0.0
            del self._unsent[: len(chunk)]
        return True

    def _note(self, reason: str) -> None:
        if not self.problem:
            log.warning("spans_not_sent", to=self._collector.url, reason=reason)
        self.problem = reason

    def _save(self) -> None:
        state = {"tail": self._tail.state, "tree": self._tree.state, "sent": self.sent, "lost": self.lost}
        self._progress.save(state)
