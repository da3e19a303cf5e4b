"""Base of the engines' HTTP servers: a lease that limits their life, admin routes behind a bearer token, errors as
JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trinity_mq.config.hosts import is_loopback
from trinity_mq.engines.api_errors import ApiError, bad_request
from trinity_mq.engines.state import Lease
from trinity_mq.messages import ContentError
from trinity_mq.runtime import http
from trinity_mq.runtime.http import new_application, read_body, refuse_forged

log = structlog.get_logger(__name__)

B = TypeVar("B", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY = 64 * 1024**2
ANSWER_SECONDS = 2.0
"""Seconds that finished requests have to send their answers when the server ends."""


class EngineRequestBody(BaseModel):
    """Base of request bodies: unknown fields are an error."""

    model_config = ConfigDict(extra="forbid")


class LeaseBody(EngineRequestBody):
    """Body of ``/admin/lease``."""

    seconds: float = Field(gt=0)


def with_token_check(token: str, handler: Handler) -> Handler:
    """Return ``handler`` restricted to requests with the bearer ``token``."""

    async def checked(request: web.Request) -> web.StreamResponse:
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            credentials.encode(errors="surrogatepass"), token.encode()
        ):
            raise ApiError(
                401, "admin routes want 'Authorization: Bearer <token of the ready-file>'", code="invalid_token"
            )
        return await handler(request)

    return checked


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer :class:`ApiError` and aiohttp's HTTP errors with an OpenAI error body."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code="http_error").response()


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        ApiError: 400; the body is not a JSON object.
    """
    try:
        return http.json_object(raw)
    except ContentError as problem:
        raise bad_request(str(problem), problem.where or None) from None


def validated(fields: Mapping[str, Any], body: type[B]) -> B:
    """Parse ``fields`` as a request body.

    Raises:
        ApiError: 400; the message names the first wrong field, the value that was sent and the values that are
            accepted.
    """
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise bad_request(
                f"unknown option {where!r}; known: {', '.join(sorted(body.model_fields))}", where, "unknown_option"
            ) from None
        sent_value = "" if first["type"] == "missing" else f", got {json.dumps(first['input'], default=repr)[:80]}"
        raise bad_request(f"{where}: {first['msg']}{sent_value}", where) from None


async def read_request(request: web.Request, body: type[B]) -> B:
    """Return the parsed body of ``request``; raises :class:`ApiError` (400) if it is invalid."""
    return validated(json_object(await read_body(request)), body)


class HttpServer(ABC):
    """Serves until its lease runs out or :meth:`stop` is called."""

    def __init__(self, engine_id: str, *, token: str, host: str, port: int = 0, lease: float) -> None:
        self.url = ""
        self._id, self._token, self._host, self._port, self._lease_seconds = engine_id, token, host, port, lease
        self._ended = asyncio.Event()
        self._reason = ""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the state that every admin answer holds."""

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes in addition to lease, state and shutdown."""

    @abstractmethod
    def working(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the context in which requests are served."""

    def stop(self, reason: str) -> None:
        """Accept no more requests, finish the running requests, and end :meth:`run`."""
        if not self._ended.is_set():
            log.info("engine_stopping", engine=self._id, reason=reason)
            self._reason = reason
            self._ended.set()

    async def run(self, ready: Callable[[str], None] = lambda url: None) -> str:
        """Serve until the end, and return the reason for the end. ``ready`` is called with the URL when requests are
        accepted.
        """
        self._lease = Lease(self._lease_seconds, lambda: self.stop("lease ran out"))
        application = new_application([errors_as_json, self._not_forged], max_body=MAX_BODY)
        application.add_routes(self.routes())
        application.add_routes(
            admin_routes(self._token, gets={"state": self._state}, posts={"lease": self._renew, "shutdown": self._end})
        )
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=ANSWER_SECONDS)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self.url = f"http://{self._host}:{site.port}"
            async with self.working():
                ready(self.url)
                await self._ended.wait()
        finally:
            self._lease.end()
            await runner.cleanup()
        return self._reason

    @web.middleware
    async def _not_forged(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_loopback(self._host):
            refuse_forged(request)
        return await handler(request)

    def answer(self, **fields: Any) -> web.Response:
        """Return an admin answer with the state and ``fields``."""
        return web.json_response({"state": self.snapshot(), **fields})

    async def _state(self, request: web.Request) -> web.Response:
        return self.answer()

    async def _renew(self, request: web.Request) -> web.Response:
        self._lease.renew((await read_request(request, LeaseBody)).seconds)
        return self.answer()

    async def _end(self, request: web.Request) -> web.Response:
        self.stop("asked to")
        return self.answer()


def admin_routes(token: str, gets: Mapping[str, Handler], posts: Mapping[str, Handler]) -> list[web.RouteDef]:
    """Return the routes under ``/admin``, behind the bearer token."""
    return [
        *(
            web.get(f"/admin/{name}", with_token_check(token, handler), allow_head=False)
            for name, handler in gets.items()
        ),
        *(web.post(f"/admin/{name}", with_token_check(token, handler)) for name, handler in posts.items()),
    ]
