"""An HTTP server of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trinity_mq.cli.errors import CommandError

if TYPE_CHECKING:
    from aiohttp import web

SHUTDOWN_SECONDS = 1.0
"""Time that requests have to end when the server does."""


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application inside the block, which is given its base URL.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on; 0: a free one.

    Raises:
        CommandError: The address cannot be listened on.
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
