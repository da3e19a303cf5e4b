"""Blobs of processed chunks: removed once no checkpoint makes anybody read them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import structlog

from trinity_mq.messages import DecodeError
from trinity_mq.transport.blobs import CHUNKS, BlobStore, StoreUnavailable, patiently

log = structlog.get_logger(__name__)

PATIENCE = 10.0
"""Seconds; what is left behind, the next save removes."""


class ChunkBlobs:
    """Follows which tickets every kept checkpoint has behind it. A trainer that resumes from one reads the stream again
    from its offset, but opens no chunk of a ticket that was consumed before it.

    Args:
        store: None: there are no blobs.
        keep: How many checkpoints are kept: the newest may turn out damaged, and then an older one is resumed from.
    """

    def __init__(self, store: BlobStore | None, keep: int) -> None:
        self._store = store
        self._consumed: deque[frozenset[str]] = deque(maxlen=keep)

    async def saved(self, consumed: Iterable[str], *, last: bool = False) -> None:
        """A checkpoint was made with these tickets ``consumed``; ``last``: the run is over, no older one counts."""
        if self._store is None:
            return
        self._consumed.append(frozenset(consumed))
        if len(self._consumed) < (self._consumed.maxlen or 0) and not last:
            return  # older checkpoints, of a trainer before us, are not known
        tickets = self._consumed[-1 if last else 0]
        try:
            await patiently(_delete, self._store, tickets, seconds=PATIENCE)
        except (StoreUnavailable, DecodeError) as error:
            log.warning("blobs_left", kind=CHUNKS, reason=str(error))


def _delete(store: BlobStore, tickets: Collection[str]) -> None:
    # those that have any: nearly all of a run's tickets have none
    store.delete(*(f"{CHUNKS}/{ticket}" for ticket in store.folders(CHUNKS) if ticket in tickets))
