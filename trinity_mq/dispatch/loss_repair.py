"""Detects and republishes lost slices. Slices are lost if their task queue is deleted or purged, by hand, by a policy,
or by a broker.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Queue, Topology
from trinity_mq.bus.retry import exponential_pause
from trinity_mq.dispatch.tickets import SliceState, Ticket
from trinity_mq.messages import Heartbeat, Lane, RunnerStatus

log = structlog.get_logger(__name__)

SliceName = tuple[str, int, int]
"""Ticket id, task id and first run of a slice, as on the wire."""
LOOK_SECONDS = 2.5
"""Seconds between two checks of a task queue."""
LOST_AFTER = 15.0
"""Seconds until a slice counts as lost if no runner holds it and its queue is too short to hold it. The time is longer
than the lease of a heartbeat: a slice on its way from the queue to a runner is briefly at neither.
"""
LONGEST_PATIENCE = 16 * LOST_AFTER
"""Maximum of the time in seconds until a slice counts as lost. The time begins at :data:`LOST_AFTER` and doubles each
time slices of the ticket are republished.
"""
Waiting = Mapping[SliceName, tuple[Ticket, SliceState]]


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
        """Number of checks after which slices were republished, by ticket id."""

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
        """Forget how often slices of other tickets than these were republished."""
        for ticket in self._sent_again.keys() - set(tickets):
            del self._sent_again[ticket]

    def _patience(self, ticket: str) -> float:
        return exponential_pause(LOST_AFTER, LONGEST_PATIENCE, self._sent_again[ticket] + 1)


class LossRepair:
    """Checks the task queues of a dispatcher's open tickets every few seconds, and republishes slices that are lost.

    Args:
        tickets: Tickets that are not closed, by id.
        runners: Returns the heartbeats of the live runners.
        holders: Returns the last heartbeats of all runners that may hold slices, including runners that fell silent.
        read_to_end: Returns once all results that are on the stream now have been read.
        publish_again: Publishes slices of a ticket again.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        tickets: Mapping[str, Ticket],
        *,
        runners: Callable[[], Sequence[Heartbeat]],
        holders: Callable[[], Sequence[Heartbeat]],
        read_to_end: Callable[[], Awaitable[None]],
        publish_again: Callable[[Ticket, Sequence[SliceState]], Awaitable[None]],
    ) -> None:
        self._bus, self._topology, self._open = bus, topology, tickets
        self._runners, self._holders = runners, holders
        self._read_to_end, self._publish_again = read_to_end, publish_again
        self._looks: dict[Lane, LostSlices] = {"train": LostSlices(), "eval": LostSlices()}
        self._tickets: set[str] = set()
        """Ids of the tickets of the most recently lost slices."""
        self._last = ""
        self.resent = 0
        """Number of republished slices."""

    @property
    def last(self) -> str:
        """Description of the most recently lost slices in one line. Empty once all their tickets are closed."""
        return self._last if self._tickets & self._open.keys() else ""

    async def run(self) -> None:
        """Check the task queues until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for lane, looks in self._looks.items():
                try:
                    await self._look(lane, looks)
                except BusUnavailable as error:
                    log.info("task_queue_not_seen", lane=lane, reason=str(error))
                    looks.reset()

    async def _look(self, lane: Lane, looks: LostSlices) -> None:
        looks.keep(self._open)
        tickets = [
            open_ticket
            for open_ticket in self._open.values()
            if open_ticket.lane == lane and open_ticket.published and open_ticket.is_open
        ]
        if not tickets or not self._bus.usable:
            looks.reset()
            return
        queue = self._topology.task_queue(lane)
        messages = await self._depth(queue)
        if (waiting := self._waiting(tickets)) is None:
            looks.reset()
            return
        capacity = messages * max(ticket.grouped for ticket in tickets)
        if lost := looks.look(asyncio.get_running_loop().time(), waiting, capacity):
            await self._read_to_end()  # a slice that has left its runner has its result on the stream
            if (undecided := self._waiting(tickets)) is None:
                looks.reset()
                return
            slices = {name: undecided[name] for name in lost if name in undecided}
            await self._send_again(queue, slices)
            looks.sent_again(slices)

    async def _depth(self, queue: Queue) -> int:
        """Return the number of messages in a queue. Declare the queue again if it was deleted."""
        messages = await self._bus.depth(queue.name)
        if messages is None:
            log.warning("task_queue_gone", queue=queue.name)
            await self._bus.declare(queue)
        return messages or 0

    def _waiting(self, tickets: Sequence[Ticket]) -> Waiting | None:
        """Return the slices of open tickets that have no outcome and that no runner holds. Return None if this is
        unknown: no runner is alive, or a runner does not report its slices.
        """
        held: set[SliceName] = set()
        for beat in self._holders():
            holds = beat.detail.holds if isinstance(beat.detail, RunnerStatus) else None
            if holds is None:
                return None
            held.update((ticket, task, base) for ticket, slices in holds.items() for task, base in slices)
        if not self._runners():
            return None
        return {
            name: (ticket, task_slice)
            for ticket in tickets
            if ticket.is_open
            for task_slice in ticket.slices
            if task_slice.result is None
            and (name := (ticket.ticket, ticket.first_task + task_slice.task_id, task_slice.run_base)) not in held
        }

    async def _send_again(self, queue: Queue, lost: Waiting) -> None:
        by_ticket: dict[str, tuple[Ticket, list[SliceState]]] = {}
        for ticket, task_slice in lost.values():
            by_ticket.setdefault(ticket.ticket, (ticket, []))[1].append(task_slice)
        for ticket, slices in by_ticket.values():
            if not ticket.is_open:
                continue  # it was closed or cut off while the slices of another ticket were published
            self._tickets, self.resent = set(by_ticket), self.resent + len(slices)
            where = f"neither in the queue {queue.name} nor at a runner"
            self._last = f"{len(slices)} slices of batch {ticket.batch} were {where}"
            log.warning("slices_lost", queue=queue.name, batch=ticket.batch, slices=len(slices), action="sent again")
            ticket.resent += len(slices)
            await self._publish_again(ticket, slices)
