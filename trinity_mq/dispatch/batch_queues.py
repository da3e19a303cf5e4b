"""Manages the batch queues of an owner's tickets: declares them, renews their expiry, and replaces queues without a
leader.

Declaring a quorum queue takes the broker ten times as long as binding it. Therefore a spare queue is declared ahead,
unbound, under the id of a future ticket. The next ticket takes this id. Opening a ticket declares its queue in any
case, so the state of the spare queue is not saved. A spare queue that a killed process leaves behind expires.

RabbitMQ (observed on 3.10 and 4.0) can leave a quorum queue without a leader if its node dies while the queue is being
created, or before the node has recorded that it holds the queue. Such a queue can be declared again but never confirms
a message, and runners would hold their slices forever. Deleting and redeclaring the queue helps and loses nothing,
because the queue is empty. A node that dies can also lose a binding that was just created. Therefore existing queues
are bound again after each lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from trinity_mq.bus import Bus, BusError, BusUnavailable, Queue, Topology
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.dispatch.timeouts import UsableClock
from trinity_mq.runtime.deliveries import new_mark

log = structlog.get_logger(__name__)

NEW_PATIENCE = 5.0
"""Seconds on a usable bus within which a queue without slices must confirm a mark. After that the queue is replaced."""
TRY = 2.5
"""Seconds until another mark is sent. A publish during a leader change may never be confirmed."""
STOP_PATIENCE = 2.0
"""Maximum seconds that a stop waits for the declaration of a spare queue."""
PATIENCE = 20.0
"""Seconds on a usable bus within which a queue whose slices were published must confirm a mark. The limit is longer
than :data:`NEW_PATIENCE`, because the queue may hold experiences while most of its nodes restart.
"""


class BatchQueues:
    """Declares, watches and replaces the batch queues of tickets.

    Args:
        tickets: Returns the tickets of the owner that are not closed.
    """

    def __init__(self, bus: Bus, topology: Topology, tickets: Callable[[], Iterable[Ticket]]) -> None:
        self._bus, self._topology, self._tickets = bus, topology, tickets
        self._clock = UsableClock(bus)
        self._breaks = 0
        """Number of lost connections so far."""
        self._broke = asyncio.Event()
        self._spare: str | None = None
        self._declared: dict[str, int] = {}
        """Number of connections lost before a queue was declared ahead, by ticket id. An entry is added when the
        declaration begins.
        """
        self._spare_wanted = asyncio.Event()
        bus.on_change(self._changed)

    async def make(self, ticket: Ticket, *, again: bool) -> None:
        """Declare and bind the queue of a ticket, before its slices are published. If an earlier declaration may have
        been interrupted, wait until the queue confirms a mark, and replace it if it does not.

        Args:
            ticket: The ticket to open.
            again: True if an earlier process may have published some slices.
        """
        breaks = self._declared.pop(ticket.ticket, self._breaks)
        await self._bus.declare(self._topology.batch_queue(ticket.batch, ticket.ticket))
        if again or self._breaks != breaks:  # the earlier declaration may have been interrupted
            await self._examine(ticket, PATIENCE if again else NEW_PATIENCE)

    def next_ticket(self) -> str:
        """Return the id for a new ticket: the id of the spare queue, or a fresh id if no spare queue is declared."""
        ticket_id, self._spare = self._spare, None
        return ticket_id or uuid.uuid4().hex

    @property
    def spare(self) -> str | None:
        """Id of the next ticket if its queue is declared. None: no spare queue is ready."""
        return self._spare

    def want_spare(self) -> None:
        """Request a new spare queue. :meth:`watch` declares it. Call this after a ticket was opened and its slices were
        published.
        """
        self._spare_wanted.set()

    async def keep(self) -> None:
        """Declare the queues of published tickets and the spare queue again to renew their ``x-expires``. Publishing
        does not renew it.
        """
        for ticket in list(self._tickets()):
            if ticket.published and _takes_more(ticket):
                await self._bus.declare(self._topology.batch_queue(ticket.batch, ticket.ticket))
        if self._spare is not None:
            await self._bus.declare(self._unbound(self._spare))

    async def watch(self) -> None:
        """Examine the queues after each lost connection and maintain a spare queue, until cancelled.

        Call this only after all earlier results were read: they show which queues had content.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._examine_after_breaks(), name="examine queues")
            group.create_task(self._keep_spare(), name="spare queue")

    # -- internals

    async def _keep_spare(self) -> None:
        try:
            while True:
                await self._spare_wanted.wait()
                self._spare_wanted.clear()
                if self._spare is None:
                    await self._declare_spare()
        finally:
            await self._drop_spare()

    async def _declare_spare(self) -> None:
        name = uuid.uuid4().hex
        self._declared[name] = self._breaks
        declaring = asyncio.create_task(self._bus.declare(self._unbound(name)))
        try:
            await asyncio.shield(declaring)
        except asyncio.CancelledError:
            # a cancelled call costs its channel, and the broker might create the queue after its deletion
            await asyncio.wait([declaring], timeout=STOP_PATIENCE)
            declaring.cancel()
            await asyncio.wait([declaring])
            if not declaring.cancelled() and (failure := declaring.exception()) is not None:
                log.info("no_spare_queue", reason=str(failure))
            raise
        except BusError as error:  # the next ticket declares its own queue, or reports the error
            self._declared.pop(name)
            log.info("no_spare_queue", reason=str(error))
        else:
            self._spare = name

    async def _drop_spare(self) -> None:
        """Delete the queues that were declared ahead and have no ticket, if the broker is reachable. Otherwise they
        expire.
        """
        open_tickets = {ticket.ticket for ticket in self._tickets()}
        self._spare = None
        for name in [name for name in self._declared if name not in open_tickets]:
            del self._declared[name]
            if self._bus.usable:
                with contextlib.suppress(BusError):
                    await self._bus.delete(self._unbound(name).name)

    async def _examine_after_breaks(self) -> None:
        self._broke.set()
        while True:
            await self._broke.wait()
            self._broke.clear()
            async with asyncio.TaskGroup() as group:
                for ticket in list(self._tickets()):
                    group.create_task(self._restore(ticket))

    async def _restore(self, ticket: Ticket) -> None:
        """Bind the queue of a ticket again if the queue exists. If the ticket is published and delivers to the
        pipeline, also replace the queue if it accepts no messages. A queue that was deleted is not declared again: its
        content is lost.
        """
        queue, bound = self._topology.batch_queue(ticket.batch, ticket.ticket), False
        while not bound and _takes_more(ticket):
            await self._bus.wait_usable()
            with contextlib.suppress(BusUnavailable):
                if await self._bus.depth(queue.name) is not None:
                    await self._bus.declare(queue)
                bound = True
        if ticket.published and ticket.deliver == "pipeline":
            await self._examine(ticket, PATIENCE)

    def _unbound(self, name: str) -> Queue:
        """Return the unbound queue of a future ticket. Its batch is not known yet, so batch 0 stands for it."""
        return replace(self._topology.batch_queue(0, name), bindings=())

    def _changed(self) -> None:
        if not self._bus.usable:
            self._breaks += 1
            self._broke.set()

    async def _examine(self, ticket: Ticket, patience: float) -> None:
        """Replace the queue of a ticket until it confirms a mark. Leave a silent queue unchanged if its content is
        needed, and return early if the ticket is closed.
        """
        queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
        while _takes_more(ticket) and not await self._answers(ticket, patience):
            reported = any(task_slice.result is not None and task_slice.result.parts for task_slice in ticket.slices)
            if reported or await self._bus.depth(queue.name):
                # The content of the queue is needed and returns only with its nodes. On RabbitMQ 4.0 this is also
                # logged for a healthy queue if the broker's channel waits for another queue that has no leader.
                why = f"it confirmed nothing in {patience:g} s; it is not empty and is left unchanged"
                log.warning("batch_queue_silent", queue=queue.name, reason=why)
                return
            if _takes_more(ticket):
                log.warning("batch_queue_replaced", queue=queue.name, reason=f"it confirmed nothing in {patience:g} s")
                await self._bus.delete(queue.name)
            if _takes_more(ticket):  # the broker needs seconds to delete the queue, so the ticket may have changed
                await self._bus.declare(queue)

    async def _answers(self, ticket: Ticket, patience: float) -> bool:
        """Return whether the queue confirms or returns a mark in time. A returned mark means that the queue was deleted
        in the meantime.
        """
        exchange = self._topology.exchange("experiences")
        key = self._topology.batch_routing_key(ticket.batch, ticket.ticket)
        try:
            async with self._clock.timeout(patience):
                while True:
                    await self._bus.wait_usable()
                    with contextlib.suppress(BusUnavailable):
                        await self._bus.publish(exchange, key, new_mark(), timeout=TRY)
                        return True
        except TimeoutError:
            return False


def _takes_more(ticket: Ticket) -> bool:
    """Return whether runners may still publish to the batch queue of the ticket."""
    return ticket.deliver != "none" and ticket.manifest is None
