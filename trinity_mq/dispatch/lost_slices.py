"""Detects slices that were published and exist nowhere any more because their queue was deleted or purged. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from trinity_mq.bus.retry import exponential_pause

SliceName = tuple[str, int, int]
"""Ticket id, task id and first run of a slice, as on the wire."""
LOOK_SECONDS = 2.5
"""Seconds between two checks of a task queue."""
LOST_AFTER = 15.0
"""Seconds until a slice counts as lost if no runner holds it and its queue is too short to hold it. The time is longer
than the lease of a heartbeat: a slice on its way from the queue to a runner is briefly at neither.
"""
LONGEST_PATIENCE = 16 * LOST_AFTER
"""Upper bound of the same time in seconds. The time doubles whenever slices of the ticket are republished."""


class LostSlices:
    """Compares the waiting slices with the number of slices in a queue, check by check.

    A slice without an outcome that no runner held for :data:`LOST_AFTER` seconds must have been in the queue at the
    beginning of that time. If there are more such slices than the queue held at any check since then, the surplus is
    lost. Slices that merely wait in a queue never count as lost, however long they wait.
    """

    def __init__(self) -> None:
        self._since: dict[SliceName, float] = {}
        """Time in seconds of the first check at which no runner held the slice, by slice. In the order of
        publishing.
        """
        self._depths: deque[tuple[float, int]] = deque()
        self._sent_again: Counter[str] = Counter()
        """Number of times that slices were republished, by ticket."""

    def reset(self) -> None:
        """Forget the checks so far. Events since the last check are unknown."""
        self._since.clear()
        self._depths.clear()

    def look(self, now: float, waiting: Collection[SliceName], capacity: int) -> list[SliceName]:
        """Return the lost slices, oldest first.

        Args:
            now: Time in seconds.
            waiting: Published slices that have no outcome and that no runner holds.
            capacity: Maximum number of slices in the messages that the queue holds now.
        """
        self._depths.append((now, capacity))
        while self._depths[0][0] < now - LOST_AFTER:
            self._depths.popleft()
        earlier_since, self._since = self._since, {}
        # stable sort: new slices stay in the order of publishing
        for name in sorted(waiting, key=lambda name: earlier_since.get(name, now)):
            self._since[name] = earlier_since.get(name, now)
        old = [name for name, since in self._since.items() if now - since >= self._patience(name[0])]
        room = max(capacity for _, capacity in self._depths)
        return old[: max(0, len(old) - room)]

    def sent_again(self, names: Collection[SliceName]) -> None:
        """Record that these slices are in the queue again."""
        for name in names:
            self._since.pop(name, None)
        self._sent_again.update({name[0] for name in names})

    def keep(self, tickets: Collection[str]) -> None:
        """Forget all tickets except these."""
        for ticket in self._sent_again.keys() - set(tickets):
            del self._sent_again[ticket]

    def _patience(self, ticket: str) -> float:
        return exponential_pause(LOST_AFTER, LONGEST_PATIENCE, self._sent_again[ticket] + 1)
