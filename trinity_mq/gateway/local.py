"""Session of a single run of a workflow: the gateway's routes on loopback, for programs that take a base URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from trinity_mq.config.modes.gateway import GatewayConfig, Merge, Switches
from trinity_mq.gateway import access
from trinity_mq.gateway.app import GatewayApp
from trinity_mq.gateway.engines import EngineCalls
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import MemorySessionStore
from trinity_mq.gateway.settings import AppSettings
from trinity_mq.messages import SessionOpened
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel

ANSWER_SECONDS = 1.0
"""Seconds that running calls get to finish when the run of the workflow ends."""


class OneEngine:
    """Engine selection with a single engine: the engine that the runner chose for the run of the workflow.

    Args:
        model: The engine.
    """

    def __init__(self, model: InferenceModel) -> None:
        self._model = model
        self.is_lost = False
        """True once the engine did not answer a call."""

    def __call__(self, prefer: str = "") -> InferenceModel:
        return self._model

    def lost(self, engine: InferenceModel) -> None:
        """Record that the engine did not answer. If the run of the workflow then fails, its retry may use another
        engine.
        """
        self.is_lost = True


@dataclass(frozen=True, slots=True)
class LocalSession:
    """A session that a program uses over HTTP."""

    id: str
    url: str
    """Base URL for clients of Anthropic's API."""
    base_url: str
    """Base URL for clients of OpenAI's API: ``url`` plus ``/v1``."""
    port: int
    key: str
    store: MemorySessionStore
    engine: OneEngine

    @property
    def session(self) -> Session:
        """The session as recorded so far."""
        session = self.store.ledger.get(self.id)
        assert session is not None  # a local session is never settled
        return session


@contextlib.contextmanager
def _short(socket: Path) -> Iterator[str]:
    """Give a short path of a socket: the address of a Unix socket has at most 107 bytes on Linux."""
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)


@contextlib.asynccontextmanager
async def local_session(
    model: InferenceModel,
    clients: EngineClients,
    *,
    sampling: Mapping[str, Any],
    headers: Mapping[str, str],
    not_ready_timeout: float,
    request_timeout: float,
    merge: Merge = "renderer",
    socket: Path | None = None,
    switches: Switches = "agent",
) -> AsyncIterator[LocalSession]:
    """Serve a session on loopback while the context lasts. Only its key gives access, and only to calls.

    Args:
        model: The engine of the run of the workflow.
        clients: Connections to engines.
        sampling: Sampling parameters of that run. Its ``max_tokens`` limits only calls that set no limit.
        headers: Headers of every request to the engine.
        not_ready_timeout: Seconds to wait for an engine with weights.
        request_timeout: Seconds for each answer.
        merge: As ``gateway.merge``: whether and how engines continue from the tokens of earlier turns.
        socket: Path of a Unix socket that also serves the session, for programs without network. None: no such socket.
        switches: Whether the program may switch thinking, as ``gateway.switches``.
    """
    store, key, name = MemorySessionStore(), access.new_key(), access.new_session_id()
    settings = AppSettings(
        gateway=GatewayConfig(port=0, calls_per_minute=1_000_000, merge=merge, switches=switches),
        model_name=model.name,
        sampling={name: value for name, value in sampling.items() if name != "max_tokens"},
        max_response_tokens=sampling.get("max_tokens"),
    )
    engine = OneEngine(model)
    engines = EngineCalls(
        engine,
        clients,
        not_ready_timeout=not_ready_timeout,
        request_timeout=request_timeout,
        headers=headers,
        try_others=False,
    )
    app = GatewayApp(settings, store, engines, access.Access([access.hash_of(access.new_key())]), lambda: "")
    await store.open(
        SessionOpened(
            session=name, opened=0.0, key_hash=access.hash_of(key), scopes=["call"], idle_ttl=1e9, reward_ttl=1e9
        )
    )
    runner = web.AppRunner(
        app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=ANSWER_SECONDS
    )
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        address = None if socket is None else stack.enter_context(_short(socket))
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        if address is not None:
            await web.UnixSite(runner, address).start()
        url = f"http://127.0.0.1:{site.port}/s/{name}"
        yield LocalSession(name, url, f"{url}/v1", site.port, key, store, engine)
