"""Start and stop of a command's HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trinity_mq.errors import CommandError

if TYPE_CHECKING:
    from aiohttp import web

SHUTDOWN_SECONDS = 1.0
"""Seconds that open requests have to finish at shutdown."""


@asynccontextmanager
async def serve_app(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application inside the ``with`` block and yield its base URL.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on. 0: any free port.

    Raises:
        CommandError: The server cannot listen on the address.
    """
    from aiohttp import web

    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, or 0 for a free one"
            ) from error
        yield f"http://{f'[{host}]' if ':' in host else host}:{site.port}"
    finally:
        await runner.cleanup()
