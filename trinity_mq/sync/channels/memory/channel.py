"""The memory channel: engines stream weights over HTTP from a copy in the trainer's host memory. Nothing is written to
disk, and engines never read the live weights.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import (
    STAGING_TRIES,
    CatchUpSource,
    ChannelError,
    Manifest,
    Tensors,
    in_daemon_thread,
    label,
)
from trinity_mq.sync.channels.buckets import SpareBuffers
from trinity_mq.sync.channels.memory.host_copy import HostCopy
from trinity_mq.sync.channels.memory.server import WeightServer


class MemoryChannel:
    """Holds the committed version and the version in progress, which reuses the buffers of the version before. This
    takes the memory of two models.
    """

    def __init__(self, host: str, bucket_bytes: int, seconds: float) -> None:
        self._bucket_bytes, self._seconds = bucket_bytes, seconds
        self._server = WeightServer(host, seconds)
        self._spare = SpareBuffers()
        self._committed: HostCopy | None = None
        self._offered: HostCopy | None = None
        self._filling: asyncio.Task[None] | None = None
        """Task that fills the last offered copy."""

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Copy the weights, unless they are already copied, and return their location."""
        return await self._location(await self.stage(version, tensors, manifest, digests=True))

    async def stage(self, version: Version, tensors: Tensors, manifest: Manifest, *, digests: bool) -> HostCopy:
        """Return the complete host copy of ``version``, which may be committed next. Errors as in
        :meth:`Channel.offer`.

        ``digests``: compute the checksums now, because members request them at once. Otherwise the first request
        computes them.
        """
        copy = self.begin(version, tensors, manifest, digests=digests)
        await self._wait_until_whole(copy)
        return copy

    def begin(self, version: Version, tensors: Tensors, manifest: Manifest, *, digests: bool) -> HostCopy:
        """Do the same as :meth:`stage`, but return while the copy is being filled. Readers take its buckets as they are
        filled. The tensors must not change until all are read, or until :meth:`committed` has returned.
        """
        if self._offered is None or self._offered.version != version or self._offered.is_failed:
            copy = HostCopy(version, manifest, self._bucket_bytes, self._spare)
            self._replace(self._committed, copy)
            self._filling = asyncio.create_task(self._fill(copy, tensors, digests), name="host copy")
            return copy
        return self._offered

    async def _fill(self, copy: HostCopy, tensors: Tensors, digests: bool) -> None:
        """Fill a copy, and record the outcome in the copy."""
        seconds = self._seconds * STAGING_TRIES
        try:
            await in_daemon_thread(lambda: copy.take(tensors, digests=digests), seconds, "host copy")
        except ChannelError as error:
            copy.fail(error)
        except asyncio.CancelledError as error:
            copy.fail(error)
            raise
        if copy is self._offered:
            self._replace(self._committed, copy)  # makes the server serve the copy

    async def _wait_until_whole(self, copy: HostCopy) -> None:
        """Return once the copy is filled; errors as in :meth:`Channel.offer`."""
        if copy is self._offered and self._filling is not None:
            await asyncio.shield(self._filling)  # a cancelled caller leaves it to the next attempt
        copy.check()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Do nothing: members fetch by themselves."""

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """Keep only the copy of ``version``."""
        copy = self._offered
        if copy is not None and copy.version == version:
            await self._wait_until_whole(copy)
            self._replace(copy, None)

    async def catch_up_source(self) -> CatchUpSource | None:
        copy = self._committed
        return None if copy is None else (copy.version, await self._location(copy), copy.manifest)

    def abandon(self) -> None:
        """Copy the version again for the next attempt, because its copy may be the cause of the failure."""
        self._replace(self._committed, None)

    async def close(self) -> None:
        """Stop the server, and release the memory."""
        await self._server.close()
        self._replace(None, None)
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        self._spare.clear()

    def _replace(self, committed: HostCopy | None, offered: HostCopy | None) -> None:
        """Hold and serve these two copies, and return the buffers of other copies to the pool."""
        before = (self._committed, self._offered)
        self._committed, self._offered = committed, offered
        held = [copy for copy in (committed, offered) if copy is not None]
        self._server.copies = {label(copy.version): copy for copy in held if copy.is_whole}
        for copy in before:
            if copy is not None and all(copy is not held_copy for held_copy in held):
                copy.release()

    async def _location(self, copy: HostCopy) -> dict[str, Any]:
        return {
            "method": "memory",
            "url": f"{await self._server.url()}/{label(copy.version)}",
            "token": self._server.token,
            "bucket_bytes": copy.bucket_bytes,
        }
