"""One engine as an HTTP server: OpenAI routes for clients that sample, admin routes for its host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from trinity_mq.engines.card import CardLock
from trinity_mq.engines.generation.batch_step import PauseMode, StaticBatcher
from trinity_mq.engines.server.admin_api import AdminApi, Receiver
from trinity_mq.engines.server.http_server import HttpServer, admin_routes
from trinity_mq.engines.server.openai.api import OpenAIApi
from trinity_mq.engines.server.sleeping import Sleeper
from trinity_mq.engines.state import EngineState

MAX_BATCH_DELAY = 0.005
"""Seconds for which an engine collects concurrent requests before a static batch starts: longer than the time between
two requests of one slice, and short compared to a batch step.
"""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of an engine server."""

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
    max_batch_delay: float = MAX_BATCH_DELAY
    """Seconds for which concurrent requests are collected before a static batch starts."""
    pause_mode: PauseMode = "wait"
    lease: float = 60.0
    card: CardLock | None = None
    """Lock on the card that the engine shares with the trainer; None: the card is its own."""
    grace: float = 30.0
    """Seconds that the running batch step has to end after a request to stop. If the lease ran out, the step is cut off
    at once.
    """


class EngineServer(HttpServer):
    """Serves one generator."""

    def __init__(
        self,
        generator: Any,
        settings: ServerSettings,
        receiver: Receiver,
        batcher: Callable[[EngineState], Any] | None = None,
    ) -> None:
        """Create the server. ``batcher`` replaces :class:`StaticBatcher` for a generator that batches by itself."""
        super().__init__(
            settings.engine_id, token=settings.token, host=settings.host, port=settings.port, lease=settings.lease
        )
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
        self._settings = settings
        self._admin = AdminApi(self.batcher, self.state, generator, receiver, self.answer)
        if settings.card is not None:
            self._admin.sleeper = Sleeper(settings.card, self.state, self.batcher, generator, self.stop)
        self._openai = OpenAIApi(
            self.batcher,
            self.state,
            generator,
            name=settings.model_name,
            model_path=settings.model_path,
            max_response_tokens=settings.max_response_tokens,
            groups=batcher is None,
        )

    def stop(self, reason: str) -> None:
        """Accept no more requests, finish the batch step, and end :meth:`run`."""
        self.state.draining = True
        super().stop(reason)

    def snapshot(self) -> dict[str, Any]:
        """Return the state that every admin answer holds."""
        state, settings, counters = self.state, self._settings, self.batcher.counters
        return {
            "id": settings.engine_id,
            "name": settings.model_name,
            "model_path": settings.model_path,
            "fingerprint": settings.fingerprint,
            "state": state.label,
            "phase": state.phase,
            "paused": state.paused,
            "version": None if state.version is None else list(state.version),
            "progress": state.progress,
            "load": self.batcher.load,
            "lease_left": self._lease.left,
            "rounds": counters.batch_steps,
            "sequences": counters.sequences,
            "tokens": counters.tokens,
            "busy_seconds": counters.busy_seconds,
            "malformed_calls": counters.malformed_calls,
            "use": None if counters.use is None else counters.use.model_dump(),
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the routes in addition to lease, state and shutdown."""
        admin = self._admin
        posts = {"pause": admin.pause, "receive": admin.receive, "commit": admin.commit, "resume": admin.resume}
        posts |= {"sleep": admin.sleep, "wake": admin.wake}
        return [
            *self._openai.routes(),
            *admin_routes(self._settings.token, gets={"weight": admin.weight}, posts=posts),
            web.get("/health", self._health),
        ]

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the batcher during the block, then let it finish."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.batcher.run(), name="batcher")
            yield
            await self.batcher.close(0.0 if self._reason == "lease ran out" else self._settings.grace)

    async def _health(self, request: web.Request) -> web.Response:
        """Report that the process answers; ``state`` says what it can serve now."""
        version = None if self.state.version is None else list(self.state.version)
        return web.json_response(
            {"status": "ok", "state": self.state.label, "version": version, "load": self.batcher.load}
        )
