"""Rules of every HTTP server here: start and stop, time limits of a connection, reading a body, and refusing forged
browser requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDictProxy

from trinity_mq.config.hosts import is_loopback
from trinity_mq.errors import CommandError
from trinity_mq.messages.msgpack_scan import ContentError, check_value

HEAD_SECONDS = 65.0
"""Seconds that a connection may wait for a complete request head. Longer than load balancers (60 s) and our own clients
keep an idle connection."""
BODY_SECONDS = 120.0
"""Seconds for the whole body of a request."""
LARGE_BODY = 64 * 1024
"""Bytes from which on a JSON body is parsed in a thread."""
FORM_TYPES = frozenset({"text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""Content types that a page may send to another site without a preflight request."""
JSON = "application/json"
SHUTDOWN_SECONDS = 1.0
"""Seconds that open requests have to finish at shutdown."""
THREADS = 2
"""Number of threads that read large bodies."""
MOST_BYTES = 256 * 1024**2
"""Maximum bytes of the large bodies that are being read or wait for a thread. Further bodies are refused."""
T = TypeVar("T")


def new_application(middlewares: Iterable[Middleware] = (), *, max_body: int = 1024**2) -> web.Application:
    """Return an application that closes connections without a complete request head within :data:`HEAD_SECONDS`.

    Args:
        middlewares: The middlewares, outermost first.
        max_body: Maximum bytes of one request.
    """
    limits = {"keepalive_timeout": HEAD_SECONDS, "logger": _SERVER_LOG}
    return web.Application(middlewares=middlewares, client_max_size=max_body, handler_args=limits)


@contextlib.asynccontextmanager
async def serve_app(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application inside the ``with`` block and yield its base URL.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on. 0: any free port.

    Raises:
        CommandError: The server cannot listen on the address.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, or 0 for a free one"
            ) from error
        yield f"http://{f'[{host}]' if ':' in host else host}:{site.port}"
    finally:
        await runner.cleanup()


NOT_HTTP = (web.RequestPayloadError, HttpProcessingError)
"""Errors of bytes that are not HTTP."""


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything except bytes that are not HTTP, with which a client could fill the
    log.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], NOT_HTTP))


_SERVER_LOG = logging.getLogger("trinity_mq.http")
_SERVER_LOG.addFilter(_is_own_fault)


def route(method: str, path: str, handler: Handler) -> web.RouteDef:
    """Return a route whose handler decides whether a client that sent ``Expect`` should send its body."""
    return web.route(method, path, handler, expect_handler=_expect_later)


async def _expect_later(_: web.Request) -> None:
    """Do nothing, since :func:`read_body` answers ``Expect``."""


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        web.HTTPRequestTimeout: The body was not complete within :data:`BODY_SECONDS`.
        web.HTTPBadRequest: The body violates HTTP.
        web.HTTPRequestEntityTooLarge: The body is longer than the application allows.
        web.HTTPExpectationFailed: The client has an unknown expectation.
    """
    if expected := request.headers.get(hdrs.EXPECT):
        await _answer_expect(request, expected)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body was not complete within {BODY_SECONDS:g} s") from None
    except NOT_HTTP as error:
        raise web.HTTPBadRequest(reason=f"the body cannot be read: {type(error).__name__}") from None


async def _answer_expect(request: web.Request, expected: str) -> None:
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(reason="the only supported value of Expect is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request, an empty object without a body; errors as :func:`read_body`.

    Raises:
        ContentError: The body is not a JSON object, or contains a value that does not fit into a message.
    """
    raw = await read_body(request)
    return json_object(raw) if len(raw) < LARGE_BODY else await asyncio.to_thread(json_object, raw)


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``, an empty object for empty bytes.

    Raises:
        ContentError: As :func:`read_json`.
    """
    try:
        fields = json.loads(raw.decode("utf-8-sig") or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ContentError(f"the body is a {type(fields).__name__}, wanted a JSON object")
    check_value(fields, finite=True)
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, wanted a finite number")


def refuse_forged(request: web.Request, hosts: Collection[str] = (), types: Collection[str] = ()) -> None:
    """Refuse a request that may be a cross-site request of a browser (CSRF, DNS rebinding). Servers without
    authentication call it.

    Args:
        request: The request.
        hosts: Allowed names in ``Host`` and ``Origin``, in addition to loopback names.
        types: Allowed content types of bodies; empty: every type that needs a preflight request.

    Raises:
        web.HTTPForbidden: ``Host`` or ``Origin`` is an unknown name, or the browser reports another site for a request
            that is not a click on a link (a navigation by GET).
        web.HTTPUnsupportedMediaType: The body has no type, a type that is not in ``types``, or, if ``types`` is empty,
            a type that a page may send without a preflight request.
    """
    if refused := forgery_error(request.method, request.headers, hosts, types):
        kind, reason = refused
        raise kind(reason=reason, text=reason)


@web.middleware
async def same_site_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that applies :func:`refuse_forged` to a server on loopback."""
    refuse_forged(request)
    return await handler(request)


def forgery_error(
    method: str, headers: CIMultiDictProxy[str], hosts: Collection[str], types: Collection[str]
) -> tuple[type[web.HTTPForbidden | web.HTTPUnsupportedMediaType], str] | None:
    """Return the error and its reason for :func:`refuse_forged`; None: the request is accepted."""
    if not all(_is_among(f"//{name}", hosts) for name in headers.getall(hdrs.HOST, [""])):
        host = headers.get(hdrs.HOST)
        return web.HTTPForbidden, f"Host is {host!a}, wanted 127.0.0.1, localhost or a name that is configured"
    if (origin := headers.get(hdrs.ORIGIN)) is not None and not _is_among(origin, hosts):
        return web.HTTPForbidden, f"Origin is {origin!a}: pages of other sites are refused"
    navigates = method == hdrs.METH_GET and headers.get("Sec-Fetch-Mode") == "navigate"
    if headers.get("Sec-Fetch-Site") == "cross-site" and not navigates:
        return web.HTTPForbidden, "Sec-Fetch-Site is cross-site: pages of other sites are refused"
    if method not in {hdrs.METH_GET, hdrs.METH_HEAD} and (problem := _type_problem(headers, types)):
        return web.HTTPUnsupportedMediaType, problem
    return None


def _type_problem(headers: Mapping[str, str], types: Collection[str]) -> str | None:
    kind = headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    has_body = headers.get(hdrs.CONTENT_LENGTH, "0") != "0" or hdrs.TRANSFER_ENCODING in headers
    if kind in types or (not kind and not has_body):
        return None
    if kind and kind not in FORM_TYPES and not (types and has_body):
        return None
    return f"Content-Type is {kind!a}, wanted {' or '.join(types or (JSON,))}"


def _is_among(url: str, hosts: Collection[str]) -> bool:
    """Return whether the host of a URL is a loopback name or in ``hosts``."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return False
    return is_loopback(host) or host in hosts


class ReaderBusy(Exception):
    """Too many bytes wait to be read; the client should retry."""


class BodyReader:
    """Reads bodies of more than ``small`` bytes in threads, :data:`THREADS` at a time. It reads smaller bodies on the
    event loop, which costs less than a thread.
    """

    def __init__(self, small: int) -> None:
        self._small = small
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tmq-body")
        self._free = asyncio.Semaphore(THREADS)
        self.held = 0
        """Bytes of the large bodies that are being read or wait."""

    async def run(self, size: int, read: Callable[[], T]) -> T:
        """Return the result of ``read``.

        A caller that is cancelled while it waits does not take a thread. If the caller is cancelled later, the thread
        stays occupied and the bytes count until ``read`` ends.

        Args:
            size: Bytes of the body.
            read: Reads the body; it must not use the event loop.

        Raises:
            ReaderBusy: More than :data:`MOST_BYTES` would be read or wait.
        """
        if size <= self._small:
            return read()
        if self.held + size > MOST_BYTES:
            raise ReaderBusy(
                f"the request has {size} bytes, and {self.held} bytes of others are being read, wanted at most "
                f"{MOST_BYTES} in all; retry later"
            )
        self.held += size
        try:
            await self._free.acquire()
        except BaseException:
            self.held -= size
            raise
        loop = asyncio.get_running_loop()
        reading = self._threads.submit(contextvars.copy_context().run, read)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(self._release, size)

        reading.add_done_callback(ended)
        return await asyncio.wrap_future(reading)

    def _release(self, size: int) -> None:
        self.held -= size
        self._free.release()
