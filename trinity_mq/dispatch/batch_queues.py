"""Batch queues as their owner sees to them: made, kept from expiring, replaced where they take nothing.

RabbitMQ (3.10 and 4.0, seen) can have a quorum queue that nobody leads: its node died while it was being made, or had
not yet written down that it has it. Such a queue can be declared again and never confirms anything, and runners would
hold their slices before it for good. To delete it and declare it anew helps, and nothing is in it that could be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Queue, Topology
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.dispatch.usable_clock import UsableClock
from trinity_mq.messages import Mark
from trinity_mq.runtime.deliveries import envelope

log = structlog.get_logger(__name__)

NEW_PATIENCE = 5.0
"""Seconds on a usable bus in which a queue that nobody can have published to confirms a mark, or is replaced."""
TRY = 2.5
"""Seconds after which another mark is sent: what is published while a queue changes its leader may get no confirm."""
PATIENCE = 20.0
"""The same for one that slices went out for: a majority of its nodes may be on their way back with what is in it."""


class BatchQueues:
    """The batch queues of one scheduler's tickets.

    Args:
        bus: A connected bus.
        topology: The run's names.
        tickets: Returns the open tickets.
    """

    def __init__(self, bus: Bus, topology: Topology, tickets: Callable[[], Iterable[Ticket]]) -> None:
        self._bus, self._topology, self._tickets = bus, topology, tickets
        self._clock = UsableClock(bus)
        self._breaks = 0
        """How often the bus was lost so far."""
        self._broke = asyncio.Event()
        bus.on_change(self._changed)

    async def make(self, ticket: Ticket, *, again: bool) -> None:
        """Declare and bind the queue of a ticket whose slices are about to be published.

        Args:
            ticket: The ticket.
            again: Some of them may have been, by an earlier life.
        """
        breaks = self._breaks
        await self._bus.declare(self._queue(ticket))
        if again or self._breaks != breaks:  # an attempt may have been cut off in the middle
            await self._examine(ticket, PATIENCE if again else NEW_PATIENCE)

    async def keep(self) -> None:
        """Declare the queues anew: that starts their ``x-expires`` anew, publishing does not."""
        for ticket in list(self._tickets()):
            if ticket.published and _takes_more(ticket):
                await self._bus.declare(self._queue(ticket))

    async def watch(self) -> None:
        """See after each break that the queues still answer, until cancelled. To be begun once all results so far have
        been read: they tell what was in a queue.
        """
        self._broke.set()
        while True:
            await self._broke.wait()
            self._broke.clear()
            async with asyncio.TaskGroup() as group:
                for ticket in list(self._tickets()):
                    if ticket.published and ticket.deliver == "pipeline":
                        group.create_task(self._examine(ticket, PATIENCE))

    # -- inside

    def _queue(self, ticket: Ticket) -> Queue:
        return self._topology.batch_queue(ticket.batch, ticket.ticket)

    def _changed(self) -> None:
        if not self._bus.usable:
            self._breaks += 1
            self._broke.set()

    async def _examine(self, ticket: Ticket, patience: float) -> None:
        """Return once the queue answers, or cannot be helped."""
        queue = self._queue(ticket)
        while _takes_more(ticket) and not await self._answers(ticket, patience):
            reported = any(task_slice.result is not None and task_slice.result.parts for task_slice in ticket.slices)
            if reported or await self._bus.depth(queue.name):
                # What is in it is wanted, and comes back with its nodes or not at all. One that is well is told too
                # where the broker's channel waits for a queue without a leader (seen on 4.0).
                why = f"it confirmed nothing in {patience:g} s; it holds something and is left as it is"
                log.warning("batch_queue_silent", queue=queue.name, reason=why)
                return
            if _takes_more(ticket):
                log.warning("batch_queue_replaced", queue=queue.name, reason=f"it confirmed nothing in {patience:g} s")
                await self._bus.delete(queue.name)
            if _takes_more(ticket):  # deleting it takes the broker seconds
                await self._bus.declare(queue)

    async def _answers(self, ticket: Ticket, patience: float) -> bool:
        """Say whether a mark is taken in time, or comes back: then somebody has deleted the queue."""
        exchange, key = (
            self._topology.exchange("experiences"),
            self._topology.batch_routing_key(ticket.batch, ticket.ticket),
        )
        try:
            async with self._clock.timeout(patience):
                while True:
                    await self._bus.wait_usable()
                    nonce = uuid.uuid4().hex
                    mark = envelope(Mark(nonce=nonce), message_id=f"mark-{nonce}")
                    with contextlib.suppress(BusUnavailable):
                        await self._bus.publish(exchange, key, mark, timeout=TRY)
                        return True
        except TimeoutError:
            return False


def _takes_more(ticket: Ticket) -> bool:
    """Its batch queue is there for what runners publish."""
    return ticket.deliver != "none" and ticket.manifest is None
