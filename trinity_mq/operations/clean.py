"""Deletes the queues, exchanges and blobs of a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from trinity_mq.bus import Bus, Delivery, LockHeld, Queue, Topology
from trinity_mq.bus.streams import next_or_quiet, read_up_to_now
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.messages import DecodeError, TaskResults, decode
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.targets.connection import Target, open_bus
from trinity_mq.transport.blobs import PARTS, BlobStore, StoreUnavailable, open_store

QUIET_SECONDS = 3.0
"""Seconds without a message after which a queue counts as read, because other consumers may hold some messages."""


def saved_tickets(config: Config) -> list[str]:
    """Return the tickets of batches that may have a queue, from the explorer's state in the run folder.

    Raises:
        FatalError: The state cannot be read.
    """
    from trinity_agents.explorer.state import StateFile

    state = StateFile.of(config.path).load()
    return [*state.tickets, *state.following.tickets]


async def delete_run(target: Target, tickets: Sequence[str]) -> list[str]:
    """Delete all data of a run on its broker and in its blob store. Return lines of text for a person.

    Args:
        target: The run and its broker.
        tickets: Tickets whose batch queues may exist, in addition to the tickets named by messages on the broker and
            by folders of the blob store.

    Raises:
        CommandError: The run's explorer or trainer is running, or the blob store does not answer.
    """
    run = target.run
    try:
        store = open_store(target.broker, run)
        stored = await asyncio.to_thread(store.folders, PARTS) if store is not None else []
        async with open_bus(target, "clean") as (bus, topology):
            count = await _delete_queues(bus, topology, {*tickets, *stored})
            await bus.delete_exchanges()
            return [f"run {run!r}: {count} queues deleted, and its exchanges", await _delete_blobs(store)]
    except LockHeld as error:
        raise CommandError(f"run {run!r} is running ({error}); stop it first") from error
    except StoreUnavailable as error:
        raise CommandError(str(error)) from error


async def _delete_queues(bus: Bus, topology: Topology, tickets: set[str]) -> int:
    """Delete the run's existing queues, while this process holds the locks of explorer and trainer, so that neither can
    start. Return the number of deleted queues.

    The batch queues are deleted first, so that a retry of an interrupted deletion still finds the messages that name
    them.
    """
    for role in ("explorer", "trainer"):
        await bus.lock(topology.lock(role))  # held until the connection closes
    streams = (topology.sessions, topology.review)  # not every run uses them
    durable = [queue for queue in (*topology.durable, *streams) if await bus.depth(queue.name) is not None]
    # tickets on the ready stream no longer have a queue
    named = [queue for queue in durable if queue != topology.ready]
    tickets |= {ticket for queue in named async for ticket in _tickets_in(bus, queue)}
    names = [topology.batch_queue(0, ticket).name for ticket in tickets]
    queue_names = [name for name in names if await bus.depth(name) is not None] + [queue.name for queue in durable]
    for name in queue_names:
        await bus.delete(name)
    return len(queue_names)


async def _tickets_in(bus: Bus, queue: Queue) -> AsyncIterator[str]:
    """Yield the tickets named by the messages of a queue, because a broker does not list its queues over AMQP."""
    messages = read_up_to_now(bus, queue, new_mark(), offset=0) if queue.kind == "stream" else _waiting(bus, queue)
    async for message in messages:
        named = message.headers.get("ticket")
        if isinstance(named, str):
            yield named
        elif message.kind == TaskResults.kind:
            with contextlib.suppress(DecodeError):
                for result in decode(message.body, TaskResults, message.content_type).results:
                    yield result.ticket


async def _waiting(bus: Bus, queue: Queue) -> AsyncIterator[Delivery]:
    """Yield the waiting messages of a queue that is not a stream. They are returned to the queue at the end."""
    remaining = await bus.depth(queue.name) or 0
    async with await bus.consume(queue) as messages:
        while remaining and (delivery := await next_or_quiet(bus, messages, QUIET_SECONDS)) is not None:
            remaining -= 1
            yield delivery


async def _delete_blobs(store: BlobStore | None) -> str:
    if store is None:
        return "no blob store is known (broker.blob_store, or --blob-store): no blobs deleted"
    await asyncio.to_thread(store.delete_run)
    return f"blobs deleted: {store.url}"
