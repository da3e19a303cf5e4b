"""One engine as an HTTP server: the OpenAI routes for whoever samples, the admin routes for its host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from trinity_mq.models.engines.generation.batch_step import PauseMode, StaticBatcher
from trinity_mq.models.engines.server.admin_api import AdminApi, Receiver
from trinity_mq.models.engines.server.openai.api import OpenAIApi, Served, errors_as_json
from trinity_mq.models.engines.state import EngineState, Lease

log = structlog.get_logger(__name__)

MAX_BODY = 64 * 1024**2
ANSWER_SECONDS = 2.0
"""Time that finished requests have to send their answers when the server ends."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to serve."""

    engine_id: str
    model_name: str
    model_path: str
    token: str
    """Bearer token of the admin routes."""
    fingerprint: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    max_response_tokens: int = 2048
    max_batch_sequences: int = 1024
    max_batch_delay: float = 0.005
    pause_mode: PauseMode = "wait"
    lease: float = 60.0
    grace: float = 30.0
    """Seconds that the running batch step has to end when the server is asked to; none after the lease ran out."""


class EngineServer:
    """Serves one generator until its lease runs out or somebody ends it."""

    def __init__(
        self,
        generator: Any,
        settings: ServerSettings,
        receiver: Receiver,
        batcher: Callable[[EngineState], Any] | None = None,
    ) -> None:
        """``batcher`` makes what stands in for :class:`StaticBatcher`, where the generator batches by itself."""
        self.state = EngineState()
        self.batcher = (
            batcher(self.state)
            if batcher
            else StaticBatcher(
                generator,
                self.state,
                max_sequences=settings.max_batch_sequences,
                max_delay=settings.max_batch_delay,
                pause_mode=settings.pause_mode,
            )
        )
        self.url = ""
        self._generator, self._settings, self._receiver = generator, settings, receiver
        self._ended = asyncio.Event()
        self._reason = ""

    def stop(self, reason: str) -> None:
        """Take no more requests, finish the batch step, end :meth:`run`."""
        if not self._ended.is_set():
            log.info("engine_stopping", engine=self._settings.engine_id, reason=reason)
            self._reason = reason
            self.state.draining = True
            self._ended.set()

    async def run(self, ready: Callable[[str], None] = lambda url: None) -> str:
        """Serve; call ``ready`` with the URL when requests are taken. Returns why it ended."""
        settings = self._settings
        lease = Lease(settings.lease, lambda: self.stop("lease ran out"))
        runner = web.AppRunner(
            self._application(lease), access_log=None, handler_cancellation=True, shutdown_timeout=ANSWER_SECONDS
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, settings.host, settings.port)
            await site.start()
            self.url = f"http://{settings.host}:{site.port}"
            async with asyncio.TaskGroup() as group:
                group.create_task(self.batcher.run(), name="batcher")
                ready(self.url)
                await self._ended.wait()
                await self.batcher.close(0.0 if self._reason == "lease ran out" else settings.grace)
        finally:
            lease.end()
            await runner.cleanup()
        return self._reason

    def _application(self, lease: Lease) -> web.Application:
        settings = self._settings
        codec = self._generator.codec
        served = Served(
            name=settings.model_name,
            model_path=settings.model_path,
            max_model_len=self._generator.max_model_len,
            max_response_tokens=settings.max_response_tokens,
            vocabulary=self._generator.vocabulary,
        )
        identity = {
            "id": settings.engine_id,
            "name": settings.model_name,
            "model_path": settings.model_path,
            "fingerprint": settings.fingerprint,
        }
        admin = AdminApi(
            batcher=self.batcher,
            state=self.state,
            generator=self._generator,
            lease=lease,
            receiver=self._receiver,
            token=settings.token,
            identity=identity,
            shutdown=self.stop,
        )
        application = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY)
        application.add_routes(OpenAIApi(self.batcher, self.state, codec, served).routes())
        application.add_routes(admin.routes())
        application.add_routes([web.get("/health", self._health)])
        return application

    async def _health(self, request: web.Request) -> web.Response:
        """Say that the process answers; what it can do now is in ``state``."""
        version = None if self.state.version is None else list(self.state.version)
        return web.json_response(
            {"status": "ok", "state": self.state.label, "version": version, "load": self.batcher.load}
        )
