"""Reads the processed sets of a run for the audit of its checkpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.bus import Bus, Delivery, Topology
from trinity_mq.errors import CommandError
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, CheckpointError, find_by_name, find_checkpoints

if TYPE_CHECKING:
    from trinity_agents.trainer.audit import StreamContent
    from trinity_mq.transport.blobs import BlobStore


def checkpoints(run_folder: Path, name: str | None) -> list[Checkpoint]:
    """Return the checkpoints to check, newest first.

    Raises:
        CommandError: There is no checkpoint.
    """
    folder = run_folder / "checkpoints"
    try:
        if name not in {None, "all"}:
            return [find_by_name(folder, str(name))]
        whole, damaged = find_checkpoints(folder) if folder.is_dir() else ([], [])
    except (CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    for checkpoint in damaged:
        print(f"{checkpoint.path.name} is damaged and left out: {checkpoint.reason}", file=sys.stderr)
    if not whole:
        raise CommandError(f"{folder} holds no checkpoint to check: has the run saved one yet?")
    return whole if name == "all" else whole[:1]


async def read_content(bus: Bus, topology: Topology, store: BlobStore | None) -> StreamContent:
    """Return the current content of a run's ``ready`` stream. Only the experience ids of chunks are kept.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    from trinity_mq.bus.streams import read_up_to_now
    from trinity_mq.runtime.deliveries import new_mark

    reader = StreamReader(store)
    stream = dataclasses.replace(topology.ready, redeclare=False)  # an audit must not create the stream
    async for delivery in read_up_to_now(bus, stream, new_mark(), offset=0):
        if not bus.is_foreign(delivery):
            await reader.take(delivery)
    return reader.content


class StreamReader:
    """Collects the complete sets of a stream, delivery by delivery. Only the experience ids of chunks are kept."""

    def __init__(self, store: BlobStore | None) -> None:
        from trinity_agents.trainer.audit import StreamContent

        self.content = StreamContent()
        self._store = store
        self._begun = False
        self._chunks: defaultdict[tuple[str, str], dict[int, list[str] | None]] = defaultdict(dict)
        self._tickets: set[str] = set()

    async def take(self, delivery: Delivery) -> None:
        """Process the next delivery."""
        from trinity_agents.trainer.audit import StreamSet
        from trinity_mq.messages import BatchReady, DecodeError, decode_any
        from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE

        assert delivery.offset is not None
        if not self._begun:
            self._begun, self.content.begins = True, delivery.offset
        if delivery.content_type in {EXPERIENCES, REFERENCE}:
            ticket, op, n = (delivery.headers.get(name) for name in ("ticket", "op", "n"))
            if isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int):
                chunks = self._chunks[ticket, op]
                if n not in chunks:
                    chunks[n] = await self._uids(delivery)
            return
        try:
            message = decode_any(delivery.body, delivery.content_type)
        except DecodeError:
            return  # the trainer has already reported it
        if not isinstance(message, BatchReady):
            return
        key = message.ticket, message.op
        chunks = self._chunks.get(key, {})
        if key in self.content.sets or any(n not in chunks for n in range(message.chunks)):
            return
        chunk_ids = [chunks[n] for n in range(message.chunks)]
        uids = None if None in chunk_ids else frozenset(uid for chunk in chunk_ids for uid in chunk or ())
        is_first = message.ticket not in self._tickets
        self.content.sets[key] = StreamSet(delivery.offset, is_first, uids, message.other_chain)
        self._tickets.add(message.ticket)

    async def _uids(self, delivery: Delivery) -> list[str] | None:
        """Return the experience ids in a chunk; None if it cannot be read."""
        from trinity_mq.experience import DecodeError, ExperienceBatch
        from trinity_mq.transport.blobs import StoreUnavailable, resolve_body

        def read() -> list[str]:
            body = resolve_body(self._store, delivery.body, delivery.content_type)
            return list(ExperienceBatch.decode(body).settle().ids("uid"))

        try:
            return await asyncio.to_thread(read)
        except (DecodeError, StoreUnavailable):
            return None
