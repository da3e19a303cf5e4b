"""Finds slices that were published and are nowhere any more: their queue was deleted or purged. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

SliceName = tuple[str, int, int]
"""Ticket, task id and first run of a slice, as on the wire."""
LOOK_SECONDS = 2.5
"""Seconds between two looks at a task queue."""
LOST_AFTER = 15.0
"""Seconds for which a slice is at no runner, and its queue too short to hold it, until it counts as lost. Longer than a
heartbeat's lease: a slice that passes from the queue to a runner is for a moment at neither."""
LONGEST_PATIENCE = 16 * LOST_AFTER
"""Upper bound of the same: it doubles each time that a slice of the ticket is sent again."""


class LostSlices:
    """Compares what waits with what a queue holds, look by look.

    A slice that has no outcome and is at no runner for :data:`LOST_AFTER` must have been in the queue at the beginning
    of that time. If there are more such slices than the queue held at any look since then, the surplus is lost. Slices
    that merely wait in a queue are never lost by this, however long they wait.
    """

    def __init__(self) -> None:
        self._since: dict[SliceName, float] = {}
        """By slice that is at no runner: when that was first seen; in the order of publishing."""
        self._depths: deque[tuple[float, int]] = deque()
        self._sent_again: Counter[str] = Counter()
        """By ticket: how often slices of it were sent again."""

    def reset(self) -> None:
        """Forget the looks so far: what happened since the last one is not known."""
        self._since.clear()
        self._depths.clear()

    def look(self, now: float, waiting: Collection[SliceName], capacity: int) -> list[SliceName]:
        """Return the slices that are lost, oldest first.

        Args:
            now: Time in seconds.
            waiting: Published slices without an outcome that are at no runner.
            capacity: Most slices that the queue's present messages hold.
        """
        self._depths.append((now, capacity))
        while self._depths[0][0] < now - LOST_AFTER:
            self._depths.popleft()
        before, self._since = self._since, {}
        for name in sorted(waiting, key=lambda name: before.get(name, now)):  # stable: new ones as they were published
            self._since[name] = before.get(name, now)
        old = [name for name, since in self._since.items() if now - since >= self._patience(name[0])]
        room = max(capacity for _, capacity in self._depths)
        return old[: max(0, len(old) - room)]

    def sent_again(self, names: Collection[SliceName]) -> None:
        """Note that these slices are in the queue again."""
        for name in names:
            self._since.pop(name, None)
        self._sent_again.update({name[0] for name in names})

    def keep(self, tickets: Collection[str]) -> None:
        """Forget all tickets but these."""
        for gone in self._sent_again.keys() - set(tickets):
            del self._sent_again[gone]

    def _patience(self, ticket: str) -> float:
        return float(min(LOST_AFTER * 2 ** self._sent_again[ticket], LONGEST_PATIENCE))
