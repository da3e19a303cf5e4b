"""An engine whose model runs on a third party's server: requests pass to an OpenAI-compatible URL, whose health is
watched.

Our own process stands in between for three reasons. API keys stay on the machines that need them. Runners find the
model like any other engine. Request fields that only our engines understand do not reach a server that would refuse
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from trinity_mq.config import AuxiliaryModelConfig
from trinity_mq.engines.api_errors import ApiError, bad_request, not_current, stopping
from trinity_mq.engines.protocol import Engine, EngineJob
from trinity_mq.engines.server.http_server import HttpServer, json_object, validated
from trinity_mq.engines.server.openai.requests import ScoreBody
from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.http import read_body

log = structlog.get_logger(__name__)

HEALTH_INTERVAL = 10.0
"""Seconds between two health checks of the server, which request its list of models. A call that loses the connection
triggers a check after a second.
"""
HEALTH_SECONDS = 10.0
"""Seconds for one health request."""
OURS = ("continue_messages", "continue_tokens", "max_prompt_tokens", "return_prompt_text", "return_token_ids")
"""Request fields of our engines that external servers do not know. Exception: a vLLM knows the last field."""
OF_VLLM = ("add_generation_prompt", "continue_final_message")
"""Request fields of servers that also return token ids, such as vLLM. Other servers refuse them."""
BUSY = frozenset({429, 502, 503, 504})
"""HTTP statuses that ask the client to try again later."""


class ExternalServer(HttpServer):
    """Serves the model of the external server at ``model.url``.

    Args:
        model: URL and name of the model.
        engine_id: Id of the engine.
        key: API key of the external server.
        token: Bearer token of the admin routes.
        host: Address to listen on.
        lease: Seconds after which the process ends if its host has not called.
    """

    def __init__(
        self,
        model: AuxiliaryModelConfig,
        *,
        engine_id: str,
        key: str | None,
        token: str,
        host: str = "127.0.0.1",
        lease: float = 60.0,
    ) -> None:
        super().__init__(engine_id, token=token, host=host, lease=lease)
        self.model = model
        self._base = str(model.url).rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.served_name = model.served_name
        self.trouble: str | None = "no health check has run yet"
        """Reason why nothing is served; None while the external server is healthy."""
        self.load = 0
        self._check_now = asyncio.Event()

    async def run(self, ready: Callable[[str], None] = lambda url: None) -> str:
        """Serve until the end, and return the reason for the end. ``ready`` is called with the URL when requests are
        accepted.
        """
        limit = aiohttp.ClientTimeout(total=self.model.timeout, sock_connect=HEALTH_SECONDS)
        async with aiohttp.ClientSession(timeout=limit, headers=self._headers) as self._session:
            return await super().run(ready)

    def snapshot(self) -> dict[str, Any]:
        """Return the state that every admin answer holds."""
        return {
            "id": self._id,
            "name": self.model.name,
            "model_path": "",
            "fingerprint": "",
            "state": "draining" if self._ended.is_set() else "unreachable" if self.trouble else "current",
            "trouble": self.trouble,
            "version": None,
            "progress": 0,
            "load": self.load,
            "tokens": 0,
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the routes in addition to lease, state and shutdown."""
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions", self._forward),
            web.post("/v1/completions", self._forward),
            web.post("/v1/embeddings", self._forward),
            web.post("/v1/tokenize", self._refuse_tokenize),
            web.post("/v1/logprobs", self._score),
        ]

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Watch the external server's health during the block."""
        await self._check_health()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_health(), name="health")
            yield
            watching.cancel()

    # -- health of the external server

    async def _watch_health(self) -> None:
        while True:
            try:
                async with asyncio.timeout(HEALTH_INTERVAL):
                    await self._check_now.wait()
            except TimeoutError:
                pass
            else:
                self._check_now.clear()
                # the server has failed just now: give it time
                await asyncio.sleep(min(1.0, HEALTH_INTERVAL))
            await self._check_health()

    async def _check_health(self) -> None:
        """Request the list of models from the external server, and update ``trouble``."""
        url = f"{self._base}/models"
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self._session.get(url) as response:
                body = await response.read()
                trouble = self._read_models(response.status, body)
        except TimeoutError:
            trouble = f"{url}: no answer within {HEALTH_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            trouble = f"{url}: {type(error).__name__}: {error}"
        if trouble != self.trouble:
            log.info("external_server_health_changed", model=self.model.name, url=self._base, trouble=trouble)
        self.trouble = trouble

    def _read_models(self, status: int, body: bytes) -> str | None:
        """Return the fault in the server's list of models, or None. Set ``served_name`` from the list if it is not
        configured.
        """
        url = f"{self._base}/models"
        if status in {401, 403}:
            source = self.model.api_key_env or self.model.api_key_file
            return f"{url}: HTTP status {status}: " + (
                f"the key in {source} is not accepted" if source else "it needs a key; set api_key_env or api_key_file"
            )
        if self.served_name is not None and status == 404:
            return None  # a server without a list of models may still serve
        if status != 200:
            return f"{url}: HTTP status {status}; wanted the list of models of an OpenAI-compatible server"
        try:
            names = [str(model_entry["id"]) for model_entry in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            return f"{url}: {body[:80]!r} is not a list of models; is {self.model.url} an OpenAI-compatible server's?"
        if self.model.served_name is None:
            if len(names) != 1:
                return f"{url} lists {len(names)} models ({', '.join(names[:5])}); choose one with served_name"
            self.served_name = names[0]
        return None

    # -- requests that are forwarded

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = self._forwarded_body(await self._body(request), request.path)
        return await self._send(request, request.path.removeprefix("/v1"), body)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if self._ended.is_set():
            raise stopping()
        if self.trouble is not None:
            raise not_current(f"auxiliary model {self.model.name!r}: {self.trouble}")
        return json_object(await read_body(request))

    def _forwarded_body(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a request in the form that the external server understands."""
        wants_ids = bool(body.get("return_token_ids"))
        refused = OURS if self.model.token_ids else (*OURS, *OF_VLLM)
        forwarded = {key: value for key, value in body.items() if key not in refused and value is not None}
        if wants_ids and self.model.token_ids:
            forwarded["return_token_ids"] = True
            forwarded.setdefault("logprobs", True if path.endswith("/chat/completions") else 0)
        return {**forwarded, "model": self.served_name}

    async def _send(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        """Forward a request and return the answer. A stream is forwarded piece by piece."""
        stream: web.StreamResponse | None = None
        self.load += 1
        try:
            async with self._session.post(self._base + path, json=body) as answer:
                if answer.status in BUSY:
                    raise await self._busy(answer)
                if answer.content_type != "text/event-stream":
                    content = await answer.read()
                    return web.Response(body=content, status=answer.status, content_type=answer.content_type)
                stream = web.StreamResponse(status=answer.status, headers={"Content-Type": "text/event-stream"})
                await stream.prepare(request)
                async for piece in answer.content.iter_any():
                    await stream.write(piece)
                await stream.write_eof()
                return stream
        except (TimeoutError, aiohttp.ClientError) as error:
            if stream is not None:  # too late for an error answer: the stream breaks off
                raise ConnectionResetError(f"{self._base}{path}: {type(error).__name__}: {error}") from error
            raise self._send_error(path, error) from None
        finally:
            self.load -= 1

    def _send_error(self, path: str, error: Exception) -> ApiError:
        """Return the error answer for a failed request to the external server."""
        message = f"auxiliary model {self.model.name!r}: {self._base}{path}: {type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            timed_out = f"{self._base}{path}: no answer within {self.model.timeout:g} s (auxiliary_models.timeout)"
            return ApiError(504, timed_out, code="server_timeout")
        if not isinstance(error, aiohttp.ClientConnectionError):
            return ApiError(502, message, code="server_answer")
        self.trouble = f"{self._base}{path}: {type(error).__name__}: {error}"
        self._check_now.set()
        return not_current(message)

    async def _busy(self, answer: aiohttp.ClientResponse) -> ApiError:
        error_text = (await answer.content.read(300)).decode(errors="replace")
        try:
            wait = float(answer.headers.get("Retry-After", 1.0))
        except ValueError:  # the header holds a date
            wait = 1.0
        message = f"auxiliary model {self.model.name!r}: {answer.url}: HTTP status {answer.status}: {error_text}"
        return ApiError(503, message, code="server_busy", retry_after=wait)

    async def _score(self, request: web.Request) -> web.Response:
        """Return the logprob of every given token after the first, from an external server with vLLM's extensions."""
        body = await self._body(request)
        if not self.model.token_ids:
            raise self._unsupported("logprobs of given tokens")
        score = validated(body, ScoreBody)
        tokens = score.tokens
        if score.temperature != 1:
            raise bad_request(f"an external server scores at temperature 1 only; got {score.temperature:g}")
        fields = {
            "model": self.served_name,
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        answer = await self._send(request, "/completions", fields)
        if not isinstance(answer, web.Response) or answer.status != 200 or not isinstance(answer.body, bytes):
            raise ApiError(502, f"{self._base}/completions: HTTP status {answer.status}", code="server_answer")
        try:
            rows = json.loads(answer.body)["choices"][0]["prompt_logprobs"][1:]
            logprobs = [float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens[1:], strict=True)]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self._unsupported(f"prompt_logprobs ({type(error).__name__})") from error
        return web.json_response({"logprobs": logprobs, "weight_version": [0, 0]})

    async def _refuse_tokenize(self, request: web.Request) -> web.Response:
        raise self._unsupported("the tokens of a text")

    def _unsupported(self, feature: str) -> ApiError:
        return bad_request(
            f"auxiliary model {self.model.name!r} at {self._base} does not return {feature}, which is needed here. "
            "Use a model that an engine of this run serves, or, if the server is a vLLM, set token_ids: true",
            code="no_token_ids",
        )

    # -- requests that are answered here

    async def _health(self, request: web.Request) -> web.Response:
        state = self.snapshot()
        return web.json_response({"status": "ok", **{key: state[key] for key in ("state", "trouble", "load")}})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model.name, "object": "model", "created": 0, "owned_by": self._base}
        return web.json_response({"object": "list", "data": [model]})


class ExternalEngine(Engine):
    """Forwards to the OpenAI-compatible server of an auxiliary model."""

    @contextlib.asynccontextmanager
    async def serve(self, job: EngineJob) -> AsyncIterator[HttpServer]:
        """Yield the forwarding server."""
        rollout, model = job.config.explorer.rollout_model, job.auxiliary
        if model is None:
            raise ModelError("an external engine takes no weights, so it cannot serve the policy")
        yield ExternalServer(
            model, engine_id=job.engine_id, key=_key(model), token=job.token, host=rollout.host, lease=rollout.lease
        )


def _key(model: AuxiliaryModelConfig) -> str | None:
    """Return the server's API key, or None without a configured key.

    Raises:
        ModelError: The configured file or environment variable does not hold the key.
    """
    who = f"auxiliary model {model.name!r}"
    if (path := model.api_key_file) is not None:
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ModelError(f"{who}: {path} (api_key_file) cannot be read where the explorer runs: {reason}") from None
        if not key:
            raise ModelError(f"{who}: {path} (api_key_file) is empty; wanted the key")
        return key
    if model.api_key_env is None:
        return None
    key = os.environ.get(model.api_key_env, "").strip()
    if not key:
        raise ModelError(
            f"{who}: the environment variable {model.api_key_env} (api_key_env) is not set where the explorer runs; "
            f"set it to the key of the server at {model.url}"
        )
    return key
