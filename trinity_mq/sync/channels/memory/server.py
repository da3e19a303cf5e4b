"""HTTP server in the trainer, from which engines stream weights.

``GET /weights/<version>`` returns the checksums, ``GET /weights/<version>/<bucket>`` the bytes of one bucket.
"""

from __future__ import annotations

import asyncio
import secrets

import structlog
from aiohttp import web

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.server.http_server import errors_as_json, with_token_check
from trinity_mq.runtime.http import new_application
from trinity_mq.sync.channels.base import ChannelError, in_daemon_thread
from trinity_mq.sync.channels.buckets import raw
from trinity_mq.sync.channels.memory.host_copy import HostCopy

log = structlog.get_logger(__name__)

CHUNK_BYTES = 2**20
"""Bytes handed to the socket at a time. Between two chunks the event loop can run other tasks."""
CLOSE_SECONDS = 1.0


class WeightServer:
    """Serves host copies, by version, to clients with the token.

    Args:
        host: Address of this machine that engines can reach.
        seconds: Limit for sending one bucket. A stalled reader does not hold memory forever.
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
            digests = await in_daemon_thread(copy.digests, self._seconds, "checksums")
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
            async with asyncio.timeout(self._seconds):
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
