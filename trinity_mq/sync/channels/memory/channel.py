"""The memory channel: engines stream weights over HTTP from a host copy of them; no disk, and never the live ones."""

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
    """Holds the committed version, and the one under way in the buffers of the one before: two models of memory."""

    def __init__(self, host: str, bucket_bytes: int, seconds: float) -> None:
        self._bucket_bytes, self._seconds = bucket_bytes, seconds
        self._server = WeightServer(host, seconds)
        self._spare = SpareBuffers()
        self._committed: HostCopy | None = None
        self._offered: HostCopy | None = None
        self._filling: asyncio.Task[None] | None = None
        """Fills the copy offered last."""

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Copy the weights, unless they are copied, and say where they are."""
        return await self._where(await self.stage(version, tensors, manifest, digests=True))

    async def stage(self, version: Version, tensors: Tensors, manifest: Manifest, *, digests: bool) -> HostCopy:
        """Return the host copy of ``version``, the one that may be committed next; errors as :meth:`Channel.offer`.

        ``digests``: sum up too, since members ask for it at once; else that is done when one does.
        """
        copy = self.begin(version, tensors, manifest, digests=digests)
        await self._whole(copy)
        return copy

    def begin(self, version: Version, tensors: Tensors, manifest: Manifest, *, digests: bool) -> HostCopy:
        """As :meth:`stage`, but return while the copy is being filled: its buckets are read as they come. The tensors
        must not change before all were read, or :meth:`committed` has returned.
        """
        if self._offered is None or self._offered.version != version or self._offered.is_failed:
            copy = HostCopy(version, manifest, self._bucket_bytes, self._spare)
            self._replace(self._committed, copy)
            self._filling = asyncio.create_task(self._fill(copy, tensors, digests), name="host copy")
            return copy
        return self._offered

    async def _fill(self, copy: HostCopy, tensors: Tensors, digests: bool) -> None:
        """Fill a copy; how that ended is in the copy."""
        seconds = self._seconds * STAGING_TRIES
        try:
            await in_daemon_thread(lambda: copy.take(tensors, digests=digests), seconds, "host copy")
        except ChannelError as error:
            copy.fail(error)
        except asyncio.CancelledError as error:
            copy.fail(error)
            raise
        if copy is self._offered:
            self._replace(self._committed, copy)  # served from now on

    async def _whole(self, copy: HostCopy) -> None:
        """Return once the copy is filled; errors as :meth:`Channel.offer`."""
        if copy is self._offered and self._filling is not None:
            await asyncio.shield(self._filling)  # a caller that is cancelled leaves it to the next try of this version
        copy.check()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Nothing to do: members fetch by themselves."""

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """Keep the copy of ``version`` alone."""
        copy = self._offered
        if copy is not None and copy.version == version:
            await self._whole(copy)
            self._replace(copy, None)

    async def catch_up_source(self) -> CatchUpSource | None:
        copy = self._committed
        return None if copy is None else (copy.version, await self._where(copy), copy.manifest)

    def abandon(self) -> None:
        """Copy the version anew for the next try: perhaps its copy was why this one failed."""
        self._replace(self._committed, None)

    async def close(self) -> None:
        """Serve no more, and give the memory back."""
        await self._server.close()
        self._replace(None, None)
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        self._spare.clear()

    def _replace(self, committed: HostCopy | None, offered: HostCopy | None) -> None:
        """Hold these two, serve them, and fill the buffers of the others again."""
        before = (self._committed, self._offered)
        self._committed, self._offered = committed, offered
        held = [copy for copy in (committed, offered) if copy is not None]
        self._server.copies = {label(copy.version): copy for copy in held if copy.is_whole}
        for copy in before:
            if copy is not None and all(copy is not other for other in held):
                copy.release()

    async def _where(self, copy: HostCopy) -> dict[str, Any]:
        return {
            "method": "memory",
            "url": f"{await self._server.url()}/{label(copy.version)}",
            "token": self._server.token,
            "bucket_bytes": copy.bucket_bytes,
        }
