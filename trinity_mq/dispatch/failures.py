"""Counts the failures of slices by kind, for the explorer's heartbeats: text, number, and first task. No I/O."""

from __future__ import annotations

from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import FailureStatus, TaskResult
from trinity_mq.rollout.failures import failure_key
from trinity_mq.telemetry import mask_passwords

MAX_KINDS = 16
"""Maximum number of distinct kinds. Further kinds are counted together as the last kind."""
MAX_LISTED = 4
"""Maximum number of kinds in a heartbeat."""
MAX_TEXT, MAX_TAIL = 300, 80
"""Maximum characters of a failure text in a heartbeat, and how many of them come from its end, which names the place in
the file.
"""
OTHERS = "other failures; each agent's log has them"


class Failures:
    """Counts failed slices and slices with a failure message, by kind of failure."""

    def __init__(self) -> None:
        self._kinds: dict[str, FailureStatus] = {}

    def add(self, ticket: Ticket, result: TaskResult) -> None:
        """Count the failure of a slice. Slices that a cut-off left unfinished do not count.

        Slices pinned to a version wait for :meth:`add_ended`: they are repeated if the engines took the next version
        before them.
        """
        if ticket.pinned is None:
            self._add(ticket, result)

    def add_ended(self, ticket: Ticket) -> None:
        """Count the failures of a pinned ticket that is not repeated."""
        for task_slice in ticket.slices if ticket.pinned is not None else ():
            if task_slice.result is not None:
                self._add(ticket, task_slice.result)

    def _add(self, ticket: Ticket, result: TaskResult) -> None:
        cut_off = result.outcome in {"cancelled", "late"} or ticket.grace is not None
        failed = result.outcome != "finished"
        if cut_off or not (failed or result.message):
            return
        text = _shortened(result.message or f"slice {result.outcome}")
        key = failure_key(text)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS - 1:
            key = text = OTHERS
        status = self._kinds.get(key) or FailureStatus(text=text, first=_task(ticket, result))
        self._kinds[key] = status.model_copy(update={"count": status.count + 1, "failed": status.failed + failed})

    def listed(self) -> list[FailureStatus]:
        """Return the most frequent kinds, at most :data:`MAX_LISTED`."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)[:MAX_LISTED]

    def summary(self) -> str:
        """Return the most frequent failure in a sentence. The result is empty if no failure was counted."""
        return kinds[0].line() if (kinds := self.listed()) else ""


def _task(ticket: Ticket, result: TaskResult) -> str:
    index = ticket.tasks[result.task_id - ticket.first_task].index
    record = f" (record {index['index']} of {index['taskset']})" if {"taskset", "index"} <= index.keys() else ""
    return f"task {result.task_id} of batch {result.batch}{record}"


def _shortened(text: str) -> str:
    text = mask_passwords(" ".join(text.split()))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - MAX_TAIL]} ... {text[-MAX_TAIL:]}"
