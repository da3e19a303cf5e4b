"""HTTP to vLLM's server on its unix socket: requests on the event loop, commands of the weight sync from a thread."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

import aiohttp
import httpx

from trinity_mq.messages import Version
from trinity_mq.models.engines.api_errors import ApiError, stopping
from trinity_mq.models.engines.vllm import api

PauseMode = Literal["wait", "keep", "abort"]
CHUNK_LIMIT = 2**22
"""Bytes of one event of a stream: a chunk of tokens with their logprobs."""
COMMAND_TIMEOUT = 120.0
HOST = "http://vllm"
"""Any name: the socket decides where it goes. Each request has a connection of its own, which costs little here: vLLM's
server closes those on which a command has failed, and the next request on one would be lost with it."""


class VllmClient:
    """Requests to sample and to score. Use it as an async context manager."""

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
        """Say whether the server takes requests."""
        try:
            async with self._now().get(HOST + api.HEALTH) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Return the answer.

        Raises:
            ApiError: 503, the server is gone; or 500, it answered something else than 200, and what.
        """
        try:
            async with self._now().post(HOST + path, json=body or {}, params=query) as response:
                raw = await response.read()
                return _checked(response.status, raw)
        except (aiohttp.ClientError, OSError) as error:
            raise stopping() from error

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed answer; closing the iterator ends the request. Errors as :meth:`post`."""
        try:
            async with self._now().post(HOST + path, json=body) as response:
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

    def _now(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session


class VllmControl:
    """Commands from a worker thread. Each blocks until vLLM has answered, or its time is over."""

    def __init__(self, socket: Path) -> None:
        transport = httpx.HTTPTransport(uds=str(socket), limits=httpx.Limits(max_keepalive_connections=0))
        self._http = httpx.Client(transport=transport, base_url=HOST, timeout=COMMAND_TIMEOUT)

    def receive(self, spec: dict[str, Any]) -> None:
        """Have the workers receive what ``spec`` announces, beside their model, which is not touched.

        Raises:
            ApiError: Nothing has arrived.
        """
        try:
            self._post(api.START_UPDATE)
        except ApiError:
            # an update that was cut off is still open: a body that does not fit makes vLLM give it up
            try:
                self._post(api.UPDATE, {"update_info": {"given_up": True}})
            except ApiError:
                self._post(api.START_UPDATE)
        self._post(api.UPDATE, {"update_info": {"spec": spec}}, timeout=2 * float(spec["seconds"]) + 10.0)

    def put_in(self, version: Version | None, mode: PauseMode) -> None:
        """Put in what has arrived, between two steps of vLLM's; what runs goes on with it, no cache outlives it.

        Raises:
            ApiError: The weights may be half old, half new, and vLLM cannot take others any more.
        """
        self._post(api.PAUSE, mode=mode, clear_cache="true")
        try:
            self._post(api.FINISH_UPDATE, {"weight_version": api.label(version)})
        finally:
            self._post(api.RESUME)

    def score(self, token_ids: list[int], temperature: float, salt: str) -> list[float]:
        """Return the logprob of every token after the first."""
        answer = self._post(api.GENERATE, api.score_body(token_ids, temperature, salt))
        return api.read_scores(answer, token_ids, temperature)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float = COMMAND_TIMEOUT, **query: str
    ) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body or {}, params=query, timeout=timeout)
        except httpx.TimeoutException as error:
            raise _failed(f"vLLM did not answer {path} within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise stopping() from error
        return _checked(response.status_code, response.content)


def _checked(status: int, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = raw.decode(errors="replace")
    if status != 200 or not isinstance(body, dict):
        raise _failed(api.error_text(status, body))
    return body


def _failed(message: str) -> ApiError:
    return ApiError(500, message, code="generation_failed")
