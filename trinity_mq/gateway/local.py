"""Sessions of one workflow's run: the gateway's routes on loopback, for programs that are given a base URL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from trinity_mq.config.modes.gateway import GatewayConfig, Merge
from trinity_mq.gateway import access
from trinity_mq.gateway.app import GatewayApp
from trinity_mq.gateway.book import MemoryBook
from trinity_mq.gateway.engines import EngineCalls
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.settings import AppSettings
from trinity_mq.messages import SessionOpened
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel

ANSWER_SECONDS = 1.0
"""Time that calls have to end when the run does."""


@dataclass(frozen=True, slots=True)
class LocalSession:
    """A session that its program reaches over HTTP."""

    id: str
    url: str
    """Base URL of Anthropic's clients."""
    base_url: str
    """Base URL of OpenAI's clients: ``url`` and ``/v1``."""
    key: str
    book: MemoryBook

    @property
    def session(self) -> Session:
        """What has been recorded of it."""
        found = self.book.ledger.get(self.id)
        assert found is not None  # it is never settled
        return found


class _One:
    """The one engine of a run, which the runner has chosen."""

    def __init__(self, model: InferenceModel) -> None:
        self._model = model

    def __call__(self, prefer: str = "") -> InferenceModel:
        return self._model

    def lost(self, engine: InferenceModel) -> None:
        """Do nothing: the run fails, and its next attempt asks another engine."""


@contextlib.asynccontextmanager
async def local_session(
    model: InferenceModel,
    clients: EngineClients,
    *,
    temperature: float,
    top_p: float,
    max_response_tokens: int | None,
    not_ready_timeout: float,
    request_timeout: float,
    merge: Merge = "prefix",
) -> AsyncIterator[LocalSession]:
    """Serve one session on loopback while the context lasts; only its key opens it, and only for calls.

    Args:
        model: The engine to ask.
        clients: Connections to engines.
        temperature: Of sampling.
        top_p: Of sampling.
        max_response_tokens: Limit of an answer; None: the engine's own.
        not_ready_timeout: Seconds to wait for an engine with weights.
        request_timeout: Seconds for one answer.
        merge: ``renderer`` has engines go on behind the tokens of earlier turns.
    """
    book, key, name = MemoryBook(), access.new_key(), access.new_session_id()
    settings = AppSettings(
        gateway=GatewayConfig(port=0, calls_per_minute=1_000_000, merge=merge),
        model_name=model.name,
        temperature=temperature,
        top_p=top_p,
        max_response_tokens=max_response_tokens,
    )
    engines = EngineCalls(_One(model), clients, not_ready_timeout=not_ready_timeout, request_timeout=request_timeout)
    app = GatewayApp(settings, book, engines, access.Access([access.hash_of(access.new_key())]), lambda: "")
    await book.open(
        SessionOpened(
            session=name, opened=0.0, key_hash=access.hash_of(key), scopes=["call"], idle_ttl=1e9, reward_ttl=1e9
        )
    )
    runner = web.AppRunner(
        app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=ANSWER_SECONDS
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site.port}/s/{name}"
        yield LocalSession(name, url, f"{url}/v1", key, book)
    finally:
        await runner.cleanup()
