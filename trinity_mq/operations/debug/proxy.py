"""A recording HTTP proxy between a workflow and its engine.

It records the calls of any client or framework that a workflow uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from trinity_mq.models.group_format import GROUPS_HEADER
from trinity_mq.runtime.http import new_application, read_body, refuse_forged

MAX_BODY = 64 * 1024**2
NOT_PASSED = frozenset(
    {"accept-encoding", "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding"}
) | {GROUPS_HEADER.lower()}
"""Headers that are not forwarded: per-connection headers; the offer of compression, because the proxy reads the
answers; the offer of request groups, because each call is shown by itself.
"""


@dataclass
class ProxiedCall:
    """One request and its answer."""

    number: int
    method: str
    path: str
    request: Any
    """JSON body of the request; None if it is not JSON."""
    status: int = 0
    """HTTP status; 0 without an answer."""
    answer: Any = None
    """JSON body of the answer; for a stream, the list of its events. None: no answer, or it is not JSON."""
    is_stream: bool = False
    seconds: float = 0.0
    error: str = ""
    """The reason why the answer is missing or incomplete. Empty: the answer is complete."""
    engine: str = ""
    """Name of the auxiliary model; empty for the policy."""


class RecordingProxy:
    """A proxy on loopback in front of one engine.

    Args:
        upstream: The engine's base URL.
        on_call: Called with each call after it ends.
        name: Name of the engine in the recorded calls.
        numbers: Generator of call numbers, shared with other proxies. None: numbers from 1.
    """

    def __init__(
        self,
        upstream: str,
        on_call: Callable[[ProxiedCall], None],
        *,
        name: str = "",
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.url = ""
        self._upstream, self._on_call, self._name = upstream, on_call, name
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve inside the block, and yield the URL to use instead of the engine's URL."""
        application = new_application(max_body=MAX_BODY)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        # the caller sets the time limits, so the proxy waits without limit
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{site.port}"
                yield self.url
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        refuse_forged(request)
        loop = asyncio.get_running_loop()
        started = loop.time()
        body = await read_body(request)
        call = ProxiedCall(next(self._numbers), request.method, request.path, _json(body), engine=self._name)
        try:
            return await self._exchange(request, body, call)
        except asyncio.CancelledError:
            call.error = "the caller did not wait for the answer"
            raise
        except (aiohttp.ClientError, OSError) as error:
            call.error = f"{type(error).__name__}: {error}"
            # the status must not suggest that a retry could succeed
            words = {"error": {"message": f"the engine gave no answer: {call.error}", "code": "engine_lost"}}
            return web.json_response(words, status=502)
        finally:
            call.seconds = loop.time() - started
            self._on_call(call)

    async def _exchange(self, request: web.Request, body: bytes, call: ProxiedCall) -> web.StreamResponse:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED}
        url = f"{self._upstream}{request.path_qs}"
        async with self._session.request(
            request.method, url, data=body, headers={**headers, "Accept-Encoding": "identity"}, allow_redirects=False
        ) as got:
            call.status = got.status
            call.is_stream = got.content_type == "text/event-stream"
            passed = {name: value for name, value in got.headers.items() if name.lower() not in NOT_PASSED}
            if not call.is_stream:
                whole = await got.read()
                call.answer = _json(whole)
                return web.Response(status=got.status, headers=passed, body=whole)
            out = web.StreamResponse(status=got.status, headers=passed)
            await out.prepare(request)
            received = bytearray()
            try:
                async for chunk in got.content.iter_any():
                    received += chunk
                    await out.write(chunk)
                await out.write_eof()
            except (aiohttp.ClientError, OSError) as error:
                call.error = f"the stream broke off: {type(error).__name__}: {error}"
                if request.transport is not None:
                    # the response has begun, so the only way to report the error is to close the connection
                    request.transport.close()
            finally:
                call.answer = _events(bytes(received))
            return out


def _json(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _events(body: bytes) -> list[Any]:
    """Return the JSON content of each server-sent event. Events that are not JSON, such as the last, are skipped."""
    events = []
    # only line feeds end a line: JSON may contain the other line breaks of splitlines()
    for line in body.decode(errors="replace").split("\n"):
        if line.startswith("data:") and (event := _json(line.removeprefix("data:").encode())) is not None:
            events.append(event)
    return events
