"""Pooled HTTP connections to engines. Returns answers as JSON values; raises typed errors.

Requests on the event loop use aiohttp: a batch of requests costs a ninth of the CPU time of httpx (32 at once: 10 ms
instead of 90 ms). Callers in threads use httpx.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import httpx
from pydantic_core import PydanticSerializationError, to_json

from trinity_mq.messages import Version
from trinity_mq.models.errors import (
    EngineError,
    EngineLost,
    EngineNotReady,
    EngineRefused,
    PromptTooLong,
    VersionMismatch,
)
from trinity_mq.models.group_format import GROUPS_HEADER, GroupedRequest, pack_request, unpack_body
from trinity_mq.models.request_groups import CONNECT_SECONDS, GroupsNotSupported, RequestGroups
from trinity_mq.telemetry.trace import batch_at_work, span, trace_headers

VERSION_HEADER = "X-TMQ-Version"
"""``generation.step``. In a request: the only weight version that may answer it. In an answer: the version that gave
it.
"""
GROUPED = ("/v1/chat/completions", "/v1/completions")
"""Routes whose requests are sent in groups to servers that take groups."""
IDLE_SECONDS = 30.0
"""Seconds after which an idle connection is closed. The server closes later, so no request meets a closing connection.
"""


def json_text(content: Any) -> str:
    """Return ``content`` as JSON text, like :func:`json.dumps`; ten times as fast for bodies with many token ids."""
    try:
        return to_json(content).decode()
    except PydanticSerializationError:  # half a surrogate pair, which only an escape can hold
        return json.dumps(content)


class EngineClients:
    """The connections to all engines. Threads may share the synchronous methods; the other methods belong to one event
    loop.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()
        self._groups: dict[str, RequestGroups] = {}
        """Request groups by server."""

    async def post_async(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float) -> Any:
        """Return the JSON answer to a POST. Once a server has announced that it takes groups, requests made at about
        the same time are sent to it as one request.

        Raises:
            EngineNotReady: The engine answered 503.
            EngineLost: The connection failed, the engine did not answer within ``timeout`` seconds, or the answer
                cannot be read.
            EngineRefused: The engine answered with another error; the subclass depends on the error code.
        """
        all_headers = {**headers, **trace_headers()}
        try:
            if (groups := self._groups_for(url)) is not None:
                packed = pack_request(GroupedRequest(urlsplit(url).path, all_headers, body))
                try:
                    if packed is not None:
                        return await self._ask_in_group(groups, url, packed, timeout, _call_of(url, body))
                except GroupsNotSupported:  # another server now has this address
                    self._groups.pop(base_url(url), None)
            return await self._ask(url, body, all_headers, timeout)
        except TimeoutError:
            raise EngineLost(f"{url}: no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{url}: {type(error).__name__}: {error}") from error

    async def _ask(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        with span("ask engine", wait=True, attributes=_call_of(url, body)) as request_span:
            all_headers = {**headers, **request_span.parent_header()}
            async with self._connections().post(url, json=body, headers=all_headers, timeout=limit) as response:
                answer = await response.read()
            request_span.size = len(answer)
            if GROUPS_HEADER in response.headers:
                base = base_url(url)
                self._groups.setdefault(base, RequestGroups(self._connections, base))
            with span("parse answer", size=len(answer)):
                result = parse_answer(response.status, response.headers, answer, url)
            _add_usage(request_span, result)
        return result

    @staticmethod
    async def _ask_in_group(
        groups: RequestGroups, url: str, request: bytes, timeout: float, call: dict[str, str | int | float] | None
    ) -> Any:
        with span("ask engine", wait=True, attributes=call) as request_span:
            async with asyncio.timeout(timeout):
                answer = await groups.ask(request)
            request_span.size = len(answer.body)
            with span("parse answer", size=len(answer.body)):
                try:
                    result = unpack_body(answer.body)
                except ValueError as error:
                    raise EngineLost(f"{url}: {error}") from error
                result = checked(answer.status, answer.headers, result, url)
            _add_usage(request_span, result)
        return result

    def _groups_for(self, url: str) -> RequestGroups | None:
        return self._groups.get(base_url(url)) if url.endswith(GROUPED) else None

    async def open_async(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Return the response to a POST as soon as its headers have arrived; the caller reads and closes it.

        Raises:
            aiohttp.ClientError: The server did not answer. An OSError means the same.
        """
        return await self._connections().post(url, json=body, headers={**headers, **trace_headers()}, timeout=timeout)

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, json_serialize=json_text)
        return self._session

    def post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float) -> Any:
        """Return the JSON answer to a POST from a thread; errors as :meth:`post_async`."""
        with self._lock:
            if self._client is None:
                limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS)
                self._client = httpx.Client(limits=limits, trust_env=False)  # a proxy does not reach an engine
        all_headers = {**headers, **trace_headers()}
        try:
            with span("ask engine", wait=True, attributes=_call_of(url, body)) as request_span:
                all_headers |= request_span.parent_header()
                limits_of_call = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
                response = self._client.post(url, json=dict(body), headers=all_headers, timeout=limits_of_call)
                request_span.size = len(response.content)
                with span("parse answer", size=len(response.content)):
                    result = parse_answer(response.status_code, response.headers, response.content, url)
                _add_usage(request_span, result)
        except httpx.TimeoutException:
            raise EngineLost(f"{url}: no answer within {timeout:g} s") from None
        except httpx.HTTPError as error:
            raise EngineLost(f"{url}: {type(error).__name__}: {error}") from error
        return result

    async def aclose(self) -> None:
        """Close all connections."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            await group.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Close the connections of :meth:`post`, which threads use."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def parse_answer(status: int, headers: Mapping[str, str], body: bytes, url: str) -> Any:
    """Return the JSON of an answer, with the weight version from its headers.

    Raises:
        EngineError: The answer reports an error, or its body is not JSON.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        raise EngineLost(f"{url}: HTTP status {status} with a body that is not JSON: {body[:80]!r}") from None
    return checked(status, headers, answer, url)


def checked(status: int, headers: Mapping[str, str], answer: Any, url: str) -> Any:
    """Return a decoded answer, with the weight version from its headers, or raise the error that the answer reports."""
    if status == 200:
        return with_version(answer, headers)
    raise engine_error(status, headers.get("Retry-After"), answer, url)


def _call_of(url: str, body: Mapping[str, Any]) -> dict[str, str | int | float] | None:
    """Return the attributes of a call by OpenTelemetry's conventions for models; None if nothing is traced."""
    if batch_at_work() is None:
        return None
    operation = "chat" if url.endswith("/chat/completions") else "text_completion"
    return {"gen_ai.operation.name": operation, "gen_ai.request.model": str(body.get("model", ""))}


def _add_usage(request_span: span, answer: Any) -> None:
    """Add the token counts of an answer to the span of its call, if the call is traced."""
    usage = answer.get("usage") if isinstance(answer, dict) and request_span.attributes is not None else None
    if request_span.attributes is None or not isinstance(usage, dict):
        return
    for name, key in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        if isinstance(count := usage.get(key), int):
            request_span.attributes[f"gen_ai.usage.{name}_tokens"] = count


def base_url(url: str) -> str:
    """Return the scheme and address of the server in a URL.

    >>> base_url("http://127.0.0.1:8000/v1/completions")
    'http://127.0.0.1:8000'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def with_version(answer: Any, headers: Mapping[str, str]) -> Any:
    """Return ``answer`` with the weight version from the server's header, unless the answer already names a version."""
    generation, _, step = headers.get(VERSION_HEADER, "").partition(".")
    if isinstance(answer, dict) and generation.isdecimal() and step.isdecimal():
        answer.setdefault("weight_version", [int(generation), int(step)])
    return answer


def engine_error(status: int, retry_after: str | None, answer: Any, url: str) -> EngineError:
    """Return the exception for an error answer. ``answer`` is its JSON body, or the ``error`` object in the body; None
    if the body is not JSON.
    """
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    text = str(error.get("message") or f"HTTP status {status}")
    exception = _error_of(status, retry_after, error, f"{url}: {text}")
    if 400 <= status < 500:
        exception.said, exception.param = text, error.get("param")
    return exception


def _error_of(status: int, retry_after: str | None, error: Mapping[str, Any], message: str) -> EngineError:
    code = error.get("code")
    if status == 503:
        return EngineNotReady(message, _seconds(retry_after))
    if code == "version_mismatch":
        return VersionMismatch(message, _version(error.get("wanted")), _version(error.get("held")))
    if code == "context_length_exceeded" and "prompt_token_ids" in error:
        return PromptTooLong(message, error["prompt_token_ids"], error["limit"])
    return EngineRefused(message, status, code)


def stream_error(error: Any, url: str) -> EngineError:
    """Return the exception for an error event of a stream, which has no HTTP status of its own."""
    code = error.get("code") if isinstance(error, dict) else None
    return engine_error(503 if code in ("engine_stopping", "engine_not_current") else 500, None, {"error": error}, url)


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 1.0), 0.0), 60.0)
    except ValueError:  # a date, which our engines do not send
        return 1.0


def _version(value: Any) -> Version | None:
    return None if value is None else (int(value[0]), int(value[1]))
