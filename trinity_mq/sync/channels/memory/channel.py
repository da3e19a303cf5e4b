"""The memory channel: engines stream weights over HTTP from a copy in the trainer's host memory. Nothing is written to
disk, and engines never read the live weights.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import structlog
from aiohttp import web

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.server.http_server import errors_as_json, with_token_check
from trinity_mq.messages import Version
from trinity_mq.runtime.http import new_application
from trinity_mq.sync.channels.base import (
    STAGING_TRIES,
    CatchUpSource,
    ChannelError,
    Manifest,
    Tensors,
    in_daemon_thread,
    label,
    manifest_bytes,
    transfer_seconds,
)
from trinity_mq.sync.channels.buckets import SpareBuffers, raw
from trinity_mq.sync.channels.memory.host_copy import HostCopy

log = structlog.get_logger(__name__)
CHUNK_BYTES = 2**20
"""Bytes handed to the socket at a time. Between two chunks the event loop can run other tasks."""
CLOSE_SECONDS = 1.0


class MemoryChannel:
    """Holds the committed version and the version in progress, which reuses the buffers of the version before. This
    takes the memory of two models.
    """

    def __init__(self, host: str, bucket_bytes: int, seconds: float) -> None:
        self._bucket_bytes, self._seconds = bucket_bytes, seconds
        self._server = WeightServer(host, seconds)
        self._spare = SpareBuffers(pinned=True)
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
        seconds = transfer_seconds(self._seconds * STAGING_TRIES, manifest_bytes(copy.manifest))
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
            await asyncio.shield(self._filling)  # if the caller is cancelled, the task continues for the next attempt
        copy.check()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Do nothing: members fetch by themselves."""

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """Keep only the copy of ``version``, once it is complete. Do nothing if another version was offered last."""
        copy = self._offered
        if copy is not None and copy.version == version:
            await self._wait_until_whole(copy)
            self._replace(copy, None)

    async def catch_up_source(self) -> CatchUpSource | None:
        copy = self._committed
        return None if copy is None else (copy.version, await self._location(copy), copy.manifest)

    def abandon(self) -> None:
        """Forget the offered copy, so that the next attempt copies the weights again: the copy may be the cause of the
        failure.
        """
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


class WeightServer:
    """Serves host copies, by version, to clients with the token.

    Args:
        host: Address of this machine that engines can reach.
        seconds: Limit for sending one bucket, in addition to its duration at the slowest acceptable rate. A stalled
            reader does not hold memory forever.
    """

    def __init__(self, host: str, seconds: float) -> None:
        self.copies: dict[str, HostCopy] = {}
        """Host copies by :func:`trinity_mq.sync.channels.base.label`."""
        self.token = secrets.token_urlsafe(24)
        self._host, self._seconds = host, seconds
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def url(self) -> str:
        """Return the base URL of the versions; the first call starts the server.

        Raises:
            ChannelError: The server cannot listen on the host.
        """
        if self._runner is None:
            application = new_application([errors_as_json])
            bucket = with_token_check(self.token, self._bucket)
            checksums = with_token_check(self.token, self._checksums)
            application.add_routes(
                [
                    web.get("/weights/{version}", checksums, allow_head=False),
                    web.get("/weights/{version}/{bucket:[0-9]{1,9}}", bucket, allow_head=False),
                ]
            )
            runner = web.AppRunner(
                application, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
            )
            await runner.setup()
            try:
                site = web.TCPSite(runner, self._host, 0)
                await site.start()
            except OSError as error:
                await runner.cleanup()
                raise ChannelError(
                    f"the server of weights cannot listen on synchronizer.host {self._host}: {error}; set it to an "
                    "address of the trainer's machine"
                ) from error
            self._runner, self._port = runner, site.port
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/weights"

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        self.copies.clear()

    def _requested_copy(self, request: web.Request) -> HostCopy:
        version = request.match_info["version"]
        copy = self.copies.get(version)
        if copy is None:
            raise ApiError(
                404, f"version {version} is not available; available: {self._describe_copies()}", code="not_here"
            )
        return copy

    def _describe_copies(self) -> str:
        return ", ".join(f"{name} in {len(copy.flats)} buckets" for name, copy in self.copies.items()) or "none"

    async def _checksums(self, request: web.Request) -> web.Response:
        copy = self._requested_copy(request)
        copy.readers += 1
        try:
            seconds = transfer_seconds(self._seconds, manifest_bytes(copy.manifest))
            digests = await in_daemon_thread(copy.digests, seconds, "checksums")
        finally:
            copy.readers -= 1
        return web.json_response({"xxh3_128": digests})

    async def _bucket(self, request: web.Request) -> web.StreamResponse:
        copy, number = self._requested_copy(request), int(request.match_info["bucket"])
        if number >= len(copy.flats):
            raise ApiError(
                404, f"bucket {number} is not available; available: {self._describe_copies()}", code="not_here"
            )
        body = raw(copy.flats[number])
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(body)
        copy.readers += 1
        try:
            async with asyncio.timeout(transfer_seconds(self._seconds, len(body), max(1, copy.readers))):
                await response.prepare(request)
                for start in range(0, len(body), CHUNK_BYTES):
                    await response.write(body[start : start + CHUNK_BYTES])
                await response.write_eof()
        except TimeoutError:
            # The response has begun, so only a closed connection tells the reader that no more data follows.
            log.warning("weights_not_read", version=copy.version, bucket=number, reader=request.remote)
            if request.transport is not None:
                request.transport.abort()
        finally:
            copy.readers -= 1
        return response
