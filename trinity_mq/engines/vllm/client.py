"""HTTP client of vLLM's server on its unix socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from trinity_mq.engines.api_errors import ApiError, stopping
from trinity_mq.engines.vllm import api
from trinity_mq.messages import EngineUse

log = structlog.get_logger(__name__)

CHUNK_LIMIT = 2**22
"""Maximum bytes of one event of a stream: a chunk of tokens with their logprobs."""
METRICS_TIMEOUT = 5.0
BUSY = "engine_busy"
"""Error code for a request that vLLM cannot accept now; the request may be sent again."""
REFUSED = "vllm_refused"
"""Error code for a request that vLLM refuses as invalid."""
HOST = "http://vllm"
"""Placeholder host name: the socket determines the server. Each request opens its own connection, which is cheap here:
vLLM's server closes connections on which a command has failed, and the next request on such a connection would be lost.
"""


class VllmSilent(ApiError):
    """vLLM did not answer in time."""


class VllmClient:
    """Requests and commands to vLLM. Use it as an async context manager."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmClient:
        connector = aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=CHUNK_LIMIT
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def healthy(self) -> bool:
        """Return whether the server accepts requests."""
        try:
            async with self._open_session().get(HOST + api.HEALTH) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def use(self) -> EngineUse | None:
        """Return vLLM's use of its batch and its KV cache; None if it does not report them now."""
        limit = aiohttp.ClientTimeout(total=METRICS_TIMEOUT)
        try:
            async with self._open_session().get(HOST + api.METRICS, timeout=limit) as response:
                return api.read_use(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a timeout is an OSError
            log.debug("vllm_metrics_not_read", error=f"{type(error).__name__}: {error}")
            return None

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None, **query: str
    ) -> dict[str, Any]:
        """Send a request and return the JSON answer.

        Raises:
            ApiError: 503 if the server is gone, or accepts no requests now (code :data:`BUSY`). 500 if it answered
                another status than 200 (the message holds its text).
            VllmSilent: The server did not answer within ``timeout`` seconds.
        """
        return _checked(*await self._posted(path, body, timeout, **query))

    async def command(self, path: str, body: Mapping[str, Any], timeout: float) -> None:
        """Send a command whose answer is text or empty; errors as :meth:`post`."""
        status, answer = await self._posted(path, body, timeout)
        if status != 200:
            _checked(status, answer)

    async def _posted(
        self, path: str, body: Mapping[str, Any] | None, timeout: float | None, **query: str
    ) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._open_session().post(HOST + path, json=body or {}, params=query, timeout=limit) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            message = f"vLLM did not answer {path} within {timeout or 0:g} s"
            raise VllmSilent(500, message, code="generation_failed") from error
        except (aiohttp.ClientError, OSError) as error:
            raise stopping() from error

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed answer; closing the iterator ends the request. Errors as :meth:`post`."""
        try:
            async with self._open_session().post(HOST + path, json=body) as response:
                if response.status != 200:
                    _checked(response.status, await response.read())
                async for line in response.content:
                    text = line.decode().strip()
                    if text == "data: [DONE]":
                        return
                    if text.startswith("data: "):
                        event = json.loads(text.removeprefix("data: "))
                        if "error" in event:
                            raise _failed(api.error_text(200, event))
                        yield event
        except (aiohttp.ClientError, OSError) as error:
            raise stopping() from error

    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session


def _checked(status: int, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = raw.decode(errors="replace")
    if status == 503:
        raise ApiError(503, api.error_text(status, body), code=BUSY, retry_after=1.0)
    if status == 400:
        raise ApiError(500, api.error_text(status, body), code=REFUSED)
    if status != 200 or not isinstance(body, dict):
        raise _failed(api.error_text(status, body))
    return body


def _failed(message: str) -> ApiError:
    return ApiError(500, message, code="generation_failed")
