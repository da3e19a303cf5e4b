"""A gateway over HTTP in front of a scripted model: the real engine server, the real routes, a store in memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from trinity_mq.config import Config
from trinity_mq.gateway.access import Access, hash_of
from trinity_mq.gateway.app import GatewayApp
from trinity_mq.gateway.engines import EngineCalls
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import MemorySessionStore
from trinity_mq.gateway.settings import AppSettings
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel
from trinity_mq.testing.scripted import CHAT_TEMPLATE, Script, ScriptedGenerator, byte_codec, scripted_server

TINY = {"name": "t", "mode": "serve", "model": {"tiny": {}}}
NO_GROUPS = {"repeat_times": 1, "estimator": {"kind": "group", "baseline": "none", "scale": "none"}}
_PAST = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
_SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATE = CHAT_TEMPLATE.replace("{{ message.role }}\n", "{{ message.role }}\n" + _PAST).replace(
    "assistant\n{% endif %}", f"assistant\n{_SWITCH}{{% endif %}}"
)


def serving_config(**sections: Any) -> Config:
    return Config.model_validate({**TINY, "algorithm": NO_GROUPS, **sections})


def thinking_server(script: Script) -> AbstractAsyncContextManager[tuple[InferenceModel, ScriptedGenerator]]:
    """Serve a model whose template writes thoughts, and may switch them off."""
    return scripted_server(script, codec=byte_codec(TEMPLATE))


class Engines:
    """Chooses among engines that a test may take away."""

    def __init__(self, *models: InferenceModel) -> None:
        self.models, self.lost_ones, self.preferred = list(models), list[str](), list[str]()

    def __call__(self, prefer: str = "") -> InferenceModel:
        self.preferred.append(prefer)
        left = [one for one in self.models if one.url not in self.lost_ones]
        return (left or self.models)[0]

    def lost(self, engine: InferenceModel) -> None:
        self.lost_ones.append(engine.url)


@dataclass
class Serving:
    url: str
    app: GatewayApp
    store: MemorySessionStore
    engines: Engines
    calls: EngineCalls
    generator: ScriptedGenerator
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, *, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.post(self.url + path, json={} if body is None else body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, *, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def open(self, *, key: str = "", **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/sessions", body, key=key)
        assert status == 201, answer
        found: dict[str, Any] = answer
        return found

    def session(self, name: str) -> Session:
        found = self.store.ledger.get(name)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    *,
    config: Config | None = None,
    admin: str = "",
    timeout: float = 1.0,
    store: MemorySessionStore | None = None,
    clients: type[EngineClients] = EngineClients,
    server: Callable[[Script], AbstractAsyncContextManager[tuple[InferenceModel, Any]]] = scripted_server,
) -> AsyncIterator[Serving]:
    """Serve a gateway.

    Args:
        script: The model's answers.
        config: The run's configuration.
        admin: Key that may make sessions; empty: anybody may.
        timeout: Seconds to wait for an engine with weights.
        store: The sessions, for a store that several gateways share or that misbehaves.
        clients: Class of the connections to engines.
        server: Serves the script.
    """
    config = config or serving_config()
    async with server(script) as (model, generator), clients() as connections:
        engines, store = Engines(model), store or MemorySessionStore()
        calls = EngineCalls(engines, connections, not_ready_timeout=timeout, request_timeout=10.0)
        url = ""
        app = GatewayApp(AppSettings.of(config), store, calls, Access([hash_of(admin)] if admin else None), lambda: url)
        runner = web.AppRunner(app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{site.port}"
            async with aiohttp.ClientSession() as http:
                yield Serving(url, app, store, engines, calls, generator, http)
        finally:
            await runner.cleanup()
