"""Keeps the batch queues of an owner's tickets: declares them, renews their expiry, replaces those without a leader.

To make a quorum queue takes the broker ten times as long as to bind it. So one is declared ahead, not bound, under the
id of a ticket that does not exist yet: the next ticket takes that id. Opening a ticket declares its queue all the same,
whatever became of the spare one meanwhile; nothing about it is saved, and what a killed process leaves behind expires.

RabbitMQ (seen on 3.10 and 4.0) can leave a quorum queue without a leader: its node died while the queue was being made,
or before the node had written down that it holds it. Such a queue can be declared again but never confirms anything,
and runners would hold their slices for ever. Deleting it and declaring it anew helps, and loses nothing: it is empty.
A node that dies can also lose a binding that it has just made: so existing queues are bound again after each lost
connection.
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
from trinity_mq.messages import Mark
from trinity_mq.runtime.deliveries import envelope

log = structlog.get_logger(__name__)

NEW_PATIENCE = 5.0
"""Seconds on a usable bus within which a queue without slices must confirm a mark; else it is replaced."""
TRY = 2.5
"""Seconds after which another mark is sent: a publish during a change of the leader may never be confirmed."""
STOP_PATIENCE = 2.0
"""Seconds for which a stop waits until the declaration of a spare queue is through."""
PATIENCE = 20.0
"""The same for a queue whose slices were published: most of its nodes may be restarting, with its content."""


class BatchQueues:
    """Declares, watches and replaces the batch queues of tickets.

    Args:
        tickets: Returns the open tickets.
    """

    def __init__(self, bus: Bus, topology: Topology, tickets: Callable[[], Iterable[Ticket]]) -> None:
        self._bus, self._topology, self._tickets = bus, topology, tickets
        self._clock = UsableClock(bus)
        self._breaks = 0
        """Number of connections lost so far."""
        self._broke = asyncio.Event()
        self._spare: str | None = None
        self._declared: dict[str, int] = {}
        """By ticket whose queue was declared ahead, or is being: number of connections lost before that."""
        self._spare_wanted = asyncio.Event()
        bus.on_change(self._changed)

    async def make(self, ticket: Ticket, *, again: bool) -> None:
        """Declare and bind the queue of a ticket whose slices are about to be published.

        Args:
            ticket: The ticket.
            again: Some may have been published already, by an earlier process.
        """
        breaks = self._declared.pop(ticket.ticket, self._breaks)
        await self._bus.declare(self._queue(ticket))
        if again or self._breaks != breaks:  # an earlier declaration may have been interrupted
            await self._examine(ticket, PATIENCE if again else NEW_PATIENCE)

    def next_ticket(self) -> str:
        """Return the id of a new ticket: the one whose queue is declared, if there is one."""
        taken, self._spare = self._spare, None
        return taken or uuid.uuid4().hex

    @property
    def spare(self) -> str | None:
        """Id of the next ticket, if its queue is declared."""
        return self._spare

    def want_spare(self) -> None:
        """Have a queue declared ahead, while :meth:`watch` runs: a ticket was opened, and its slices are out."""
        self._spare_wanted.set()

    async def keep(self) -> None:
        """Declare the queues again, which renews their ``x-expires``; publishing does not."""
        for ticket in list(self._tickets()):
            if ticket.published and _takes_more(ticket):
                await self._bus.declare(self._queue(ticket))
        if self._spare is not None:
            await self._bus.declare(self._unbound(self._spare))

    async def watch(self) -> None:
        """Examine the queues after each lost connection and keep a spare one, until cancelled.

        To be called once all results so far were read: they show which queues had content.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._examine_after_breaks(), name="examine queues")
            group.create_task(self._keep_spare(), name="spare queue")

    # -- inside

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
            # a call that is cut off costs its channel, and its queue might be made after it was deleted
            await asyncio.wait([declaring], timeout=STOP_PATIENCE)
            declaring.cancel()
            await asyncio.wait([declaring])
            if not declaring.cancelled() and (failure := declaring.exception()) is not None:
                log.info("no_spare_queue", reason=str(failure))
            raise
        except BusError as error:  # the next ticket declares its own, or says why it cannot
            self._declared.pop(name)
            log.info("no_spare_queue", reason=str(error))
        else:
            self._spare = name

    async def _drop_spare(self) -> None:
        """Delete queues that no ticket was made for, if the broker is there; else they expire."""
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
        """Bind the queue again if it exists, then replace it if it takes nothing. One that was deleted is not made
        again: what was in it is lost.
        """
        queue, bound = self._queue(ticket), False
        while not bound and _takes_more(ticket):
            await self._bus.wait_usable()
            with contextlib.suppress(BusUnavailable):
                if await self._bus.depth(queue.name) is not None:
                    await self._bus.declare(queue)
                bound = True
        if ticket.published and ticket.deliver == "pipeline":
            await self._examine(ticket, PATIENCE)

    def _unbound(self, name: str) -> Queue:
        """Return the queue of a ticket that does not exist yet; its batch is not known either."""
        return replace(self._topology.batch_queue(0, name), bindings=())

    def _queue(self, ticket: Ticket) -> Queue:
        return self._topology.batch_queue(ticket.batch, ticket.ticket)

    def _changed(self) -> None:
        if not self._bus.usable:
            self._breaks += 1
            self._broke.set()

    async def _examine(self, ticket: Ticket, patience: float) -> None:
        """Return once the queue confirms a mark, or cannot be replaced without loss."""
        queue = self._queue(ticket)
        while _takes_more(ticket) and not await self._answers(ticket, patience):
            reported = any(task_slice.result is not None and task_slice.result.parts for task_slice in ticket.slices)
            if reported or await self._bus.depth(queue.name):
                # Its content is needed, and comes back only with its nodes. On 4.0 this is also logged for a healthy
                # queue, where the broker's channel waits for another queue that has no leader.
                why = f"it confirmed nothing in {patience:g} s; it holds something and is left as it is"
                log.warning("batch_queue_silent", queue=queue.name, reason=why)
                return
            if _takes_more(ticket):
                log.warning("batch_queue_replaced", queue=queue.name, reason=f"it confirmed nothing in {patience:g} s")
                await self._bus.delete(queue.name)
            if _takes_more(ticket):  # deleting it takes the broker seconds
                await self._bus.declare(queue)

    async def _answers(self, ticket: Ticket, patience: float) -> bool:
        """Return whether a mark is confirmed in time, or returned: then the queue was deleted meanwhile."""
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
    """Return whether runners may still publish to the ticket's batch queue."""
    return ticket.deliver != "none" and ticket.manifest is None
