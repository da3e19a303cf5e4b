"""``trinity-mq broker clean``: deletes the queues and blobs of a run that is over for good."""

from __future__ import annotations

import argparse
import asyncio

from trinity_mq.bus import Bus, LockHeld, Topology
from trinity_mq.cli.broker.connection import Target, find_target, reached
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.config import Config
from trinity_mq.transport.blobs import PARTS, BlobStore, StoreUnavailable, open_store


def clean(arguments: argparse.Namespace) -> int:
    """Delete the queues and blobs of a run that nobody works on."""
    found = find_target(arguments, arguments.blob_store)
    tickets = [] if found.config is None else _tickets(found.config)
    for line in run_to_the_end(_clean(found, tickets)):
        print(line)
    if found.config is None:
        print("queues of batches that were open expire by themselves; to delete them now give the run's YAML file")
    return 0


def _tickets(config: Config) -> list[str]:
    """Return the tickets that have a queue, as far as the explorer's state in the run folder knows."""
    from trinity_agents.explorer.state import StateFile

    state = StateFile(config.path / "state" / "explorer.db").load()
    return [*state.tickets, *state.following.tickets]


async def _clean(found: Target, tickets: list[str]) -> list[str]:
    run = found.run
    try:
        store = open_store(found.broker, run)
        stored = await asyncio.to_thread(store.folders, PARTS) if store is not None else []
        async with reached(found, "clean") as (bus, topology):
            count = await _delete_queues(bus, topology, {*tickets, *stored})
            return [f"run {run!r}: {count} queues deleted", await _delete_blobs(store)]
    except LockHeld as error:
        raise CommandError(f"run {run!r} is at work ({error}); stop it first") from error
    except StoreUnavailable as error:
        raise CommandError(str(error)) from error


async def _delete_queues(bus: Bus, topology: Topology, tickets: set[str]) -> int:
    """Delete those that exist, while nobody can begin to use them; return how many."""
    for role in ("explorer", "trainer"):
        await bus.lock(topology.lock(role))  # held until the connection closes
    names = [queue.name for queue in topology.durable]
    names += [topology.batch_queue(0, ticket).name for ticket in tickets]
    found = [name for name in names if await bus.depth(name) is not None]
    for name in found:
        await bus.delete(name)
    return len(found)


async def _delete_blobs(store: BlobStore | None) -> str:
    if store is None:
        return "no blob store is known (broker.blob_store, or --blob-store): no blobs deleted"
    await asyncio.to_thread(store.delete_run)
    return f"blobs deleted: {store.url}"
