"""Blobs of experience parts and chunks. A blob is written before its reference is sent. The blobs of parts are removed
with their batch queue, the blobs of chunks once the newest checkpoints have consumed their ticket.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog

from trinity_mq.bus import Bus, BusError, Topology
from trinity_mq.messages import DecodeError, ExperienceReference
from trinity_mq.transport.blobs import CHUNKS, PARTS, BlobStore, StoreUnavailable, run_with_store_retries

log = structlog.get_logger(__name__)

Content = bytes | ExperienceReference
"""Content of an experience message: the body, or a reference to the blob of a body that is too large."""

SWEEP_INTERVAL = 600.0
GRACE = 3600.0
"""Seconds for which blobs stay after a sweep first found their batch queue missing, because a submitter may hold
references to them."""
DELETE_PATIENCE = 10.0
"""Seconds to wait for a delete. The sweep, or the next checkpoint, removes the remaining blobs."""


def part_name(ticket: str, attempt: str, part: int) -> str:
    """Return the blob name of an experience part."""
    return f"{PARTS}/{ticket}/{attempt}-{part}.tmqx"


def chunk_name(ticket: str, op: str, n: int) -> str:
    """Return the blob name of a processed chunk."""
    return f"{CHUNKS}/{ticket}/{op}-{n}.tmqx"


async def store_large_bodies(
    store: BlobStore | None, bodies: Sequence[bytes], max_bytes: int, name: Callable[[int], str]
) -> list[Content]:
    """Write each body over ``max_bytes`` into the store, under the name for its index. Return the message contents in
    order: references to these bodies, and the other bodies themselves. Without a store nothing is written.

    Raises:
        DecodeError: A name is not a valid blob name, because the ticket is malformed.
        StoreUnavailable: The store did not answer within ``STORE_PATIENCE`` seconds.
    """
    contents: list[Content] = []
    for n, body in enumerate(bodies):
        if store is None or len(body) <= max_bytes:
            contents.append(body)
        else:
            contents.append(await run_with_store_retries(store.put, name(n), body))
    return contents


async def delete_blobs(store: BlobStore | None, *names: str) -> None:
    """Remove blobs or folders of blobs. Failed deletes are left to the sweep."""
    if store is not None:
        await _delete(store.delete, *names)


async def _delete(delete: Callable[..., None], *names: str) -> None:
    try:
        await run_with_store_retries(delete, *names, seconds=DELETE_PATIENCE)
    except (StoreUnavailable, DecodeError) as error:
        log.warning("blobs_not_deleted", names=names, reason=str(error))


class ChunkBlobs:
    """Removes the blobs of processed chunks after each of the newest ``keep`` checkpoints has consumed their tickets. A
    trainer that resumes from a checkpoint reads the stream again from its offset, but does not open chunks of tickets
    that the checkpoint has consumed.

    Args:
        store: The blob store. None: the run does not use blobs.
        keep: Number of newest checkpoints that count. If the newest is damaged, training resumes from an earlier
            checkpoint.
    """

    def __init__(self, store: BlobStore | None, keep: int) -> None:
        self._store = store
        self._consumed: deque[frozenset[str]] = deque(maxlen=keep)

    async def saved(self, consumed: Iterable[str], *, last: bool = False) -> None:
        """Record a checkpoint with these tickets ``consumed``, and delete the blobs that are no longer needed.
        ``last``: the run is over, so older checkpoints do not count. Otherwise nothing is deleted until this process
        has recorded ``keep`` checkpoints.
        """
        if self._store is None:
            return
        self._consumed.append(frozenset(consumed))
        is_full = len(self._consumed) == self._consumed.maxlen  # else the checkpoints of an earlier trainer are unknown
        if is_full or last:
            tickets = self._consumed[-1 if last else 0]
            await _delete(functools.partial(_delete_tickets, self._store, tickets), CHUNKS)


def _delete_tickets(store: BlobStore, tickets: Collection[str], kind: str) -> None:
    # Most tickets do not have blobs, so list the folders instead of deleting by each ticket.
    store.delete(*(f"{kind}/{ticket}" for ticket in store.folders(kind) if ticket in tickets))


class BlobSweep:
    """Removes the blobs of batches whose queue no longer exists, for example after a crash.

    A queue exists before the first slice of its batch is published, so blobs without a queue are no longer needed. They
    are removed after the queue has been missing for ``GRACE`` seconds.
    """

    def __init__(self, bus: Bus, topology: Topology, store: BlobStore) -> None:
        self._bus, self._topology, self._store = bus, topology, store
        self._gone_since: dict[str, float] = {}

    async def run(self) -> None:
        """Sweep every ``SWEEP_INTERVAL`` seconds until cancelled."""
        while True:
            try:
                await self.once()
            except (StoreUnavailable, DecodeError, BusError) as error:
                log.warning("sweep_failed", reason=str(error))
            await asyncio.sleep(SWEEP_INTERVAL)

    async def once(self) -> None:
        """Check every ticket with blobs of parts once, and remove the blobs whose queue was missing for long enough.

        Raises:
            StoreUnavailable: The store does not answer.
            DecodeError: A folder in the store cannot be removed safely, for example because it is a symbolic link.
            BusError: The broker does not answer.
        """
        now = asyncio.get_running_loop().time()
        tickets = await run_with_store_retries(self._store.folders, PARTS)
        orphans = [
            ticket for ticket in tickets if await self._bus.depth(self._topology.batch_queue(0, ticket).name) is None
        ]
        self._gone_since = {ticket: self._gone_since.get(ticket, now) for ticket in orphans}
        for ticket, since in self._gone_since.items():
            if now - since >= GRACE:
                await run_with_store_retries(self._store.delete, f"{PARTS}/{ticket}")
