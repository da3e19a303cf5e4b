"""Gateways of a simulated run: the real agent and its real routes, without a socket. A request runs as a task in the
gateway's process, so it is killed, frozen and disconnected together with the gateway.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

from aiohttp import StreamReader, hdrs, web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from trinity_agents.gateway.agent import Gateway
from trinity_agents.simulation.faulty_bus import FaultyBus
from trinity_agents.simulation.stand_ins import PROMPT, SimulatedEngine, token_of, weights_of
from trinity_mq.gateway.app import GatewayApp
from trinity_mq.messages import Version
from trinity_mq.models.errors import EngineLost
from trinity_mq.testing.virtual_time import OWNER

ANSWERS = 100_000
"""Larger than the tokens of :func:`token_of`. A session's token is ``answer number * ANSWERS + token of its
weights``.
"""
USER_TOKEN = 5
NOTHING: Mapping[str, str] = {}


def answer_number(token: int) -> int:
    """Return the number of the answer that contains a token."""
    return token // ANSWERS


def token_version(token: int) -> Version:
    """Return the version of the weights that sampled a token of an answer."""
    return weights_of(token % ANSWERS)


class SimulatedClients:
    """Stand-in for a gateway's connections to engines. It calls the simulated engines and numbers their answers.

    Args:
        engines: Engines by id.
    """

    def __init__(self, engines: Mapping[str, SimulatedEngine]) -> None:
        self._engines = engines
        self.answers: defaultdict[str, list[int]] = defaultdict(list)
        """Answer numbers by the last message of the request."""
        self.asked: dict[int, str] = {}
        """Last message of the request by answer number."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *about: object) -> None:
        """Do nothing."""

    async def post_async(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float) -> Any:
        """Return an engine's answer. Its text lists its tokens.

        Raises:
            EngineLost: The engine does not exist, or it aborted the request.
        """
        engine = next((simulated for name, simulated in self._engines.items() if name in url), None)
        if engine is None:
            raise EngineLost(f"{url} is no engine")
        sampled = await engine.generate(None)
        asked = str(body["messages"][-1]["content"])
        number = len(self.asked) + 1
        self.asked[number] = asked
        self.answers[asked].append(number)
        return _answer(number, body["messages"], sampled)


def _answer(number: int, messages: Sequence[Mapping[str, Any]], sampled: Sequence[tuple[Version, Version]]) -> Any:
    tokens = [number * ANSWERS + token_of(held) for held, _ in sampled]
    prompt = list(PROMPT)
    for message in messages[:-1]:
        content = str(message["content"])
        prompt += [int(token) for token in content.split()] if message["role"] == "assistant" else [USER_TOKEN]
    rows = [
        [position, *stamp]
        for position, (_, stamp) in enumerate(sampled)
        if not position or stamp != sampled[position - 1][1]
    ]
    text = " ".join(map(str, tokens))
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "text": text,
        "finish_reason": "stop",
        "token_ids": tokens,
        "token_logprobs": [-1.0] * len(tokens),
        "weight_versions": rows,
    }
    return {
        "id": f"answer-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "prompt_token_ids": [*prompt, USER_TOKEN],
        "weight_version": list(sampled[-1][1]),
        "usage": {"prompt_tokens": len(prompt) + 1, "completion_tokens": len(tokens), "total_tokens": 0},
    }


@dataclass(frozen=True)
class Reply:
    """A gateway's response to a request."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any] = field(default_factory=dict)
    tries: int = 1
    """Number of times that the request was made."""


class SimulatedGateway(Gateway):
    """A gateway whose routes are called through :meth:`request`."""

    life: FaultyBus
    """The gateway's connection."""
    http: web.Application | None = None
    _pending_requests: set[asyncio.Task[web.StreamResponse]]

    async def _serve_http(self, app: GatewayApp) -> None:
        app._draw = random.Random(self.id)  # noqa: SLF001  # a seed is a schedule
        application = app.application()
        application.freeze()
        self._pending_requests = set()
        self.url = f"http://{self.id}.test"
        self.set_state("working")
        self.heartbeat_now()
        self.http = application
        try:
            await self.woken.until(lambda: self.draining.is_set() or self.peers.explorer.finished)
        finally:
            self.http = None
            if pending := set(self._pending_requests):
                await asyncio.wait(pending, timeout=self._shutdown_seconds)
            for task in pending:
                task.cancel()

    async def request(
        self, method: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float
    ) -> Reply | None:
        """Return the response to a request. None: the gateway does not listen or ended before the response, or the
        client timed out after ``timeout`` seconds.
        """
        if self.http is None:
            return None
        context = contextvars.Context()
        context.run(OWNER.set, self.life.who)
        work = asyncio.get_running_loop().create_task(
            self.http._handle(_request(method, path, body, headers)),  # noqa: SLF001  # what a server calls
            name=f"{method} {path}",
            context=context,
        )
        self._pending_requests.add(work)
        work.add_done_callback(self._pending_requests.discard)
        try:
            ends: set[asyncio.Future[Any]] = {work, self.life.killed}
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()  # a server also cancels the handler of a disconnected client
        if not work.done() or work.cancelled():
            return None
        response = work.result()
        assert isinstance(response, web.Response)
        content = json.loads(response.text or "{}")
        return Reply(response.status, dict(response.headers), content if isinstance(content, dict) else {})


class _Protocol:
    """The parts of a request's connection that routes use."""

    ssl_context, sockname = None, ("127.0.0.1", 2)
    peername = ("127.0.0.1", 1)
    _reading_paused = False

    @property
    def transport(self) -> _Protocol:
        return self

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.peername if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self, **how: bool) -> None:
        """Do nothing: the body is complete."""

    def resume_reading(self, **how: bool) -> None:
        """Do nothing: the body is complete."""


def _request(method: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> web.Request:
    sent = json.dumps(body).encode()
    default_headers: dict[str, str] = {
        hdrs.HOST: "127.0.0.1",
        hdrs.CONTENT_TYPE: "application/json",
        hdrs.CONTENT_LENGTH: str(len(sent)),
    }
    fields = CIMultiDictProxy(CIMultiDict[str]({**default_headers, **headers}))
    raw = tuple((name.encode(), value.encode()) for name, value in fields.items())
    message = RawRequestMessage(method, path, HttpVersion11, fields, raw, False, None, False, False, URL(path))
    loop = asyncio.get_running_loop()
    protocol: Any = _Protocol()
    payload = StreamReader(protocol, 1 << 24, loop=loop)
    payload.feed_data(sent)
    payload.feed_eof()
    writer: Any = SimpleNamespace(output_size=0)
    task: Any = None
    return web.Request(message, payload, protocol, writer, task, loop, client_max_size=1 << 24)
