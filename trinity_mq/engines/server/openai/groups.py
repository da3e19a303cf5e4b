"""Route for groups of requests from our own clients; see :mod:`trinity_mq.models.group_format`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog
from aiohttp import web
from multidict import CIMultiDict

from trinity_mq.engines.api_errors import ApiError, bad_request
from trinity_mq.messages import Version
from trinity_mq.models.group_format import (
    CONTENT_TYPE,
    GroupedAnswer,
    GroupedRequest,
    pack_answer,
    pack_body,
    unpack_requests,
)
from trinity_mq.runtime.http import read_body

log = structlog.get_logger(__name__)

Answering = Callable[[str, Mapping[str, str], Mapping[str, Any]], Awaitable[tuple[bytes, Version]]]
"""Answers one request from its path, headers and body. Returns a packed body and its version; raises ApiError."""


async def answer_group(
    request: web.Request, answering: Answering, headers: Callable[[Version], dict[str, str]]
) -> web.StreamResponse:
    """Answer each request of a group as soon as its answer is ready.

    A client that closes the connection cancels the unanswered requests.

    Args:
        request: The group.
        answering: Answers one request of the group.
        headers: Returns the headers of an answer from its weight version.

    Raises:
        ApiError: 400; the body is not a group.
    """
    try:
        requests = unpack_requests(await read_body(request))
    except ValueError as error:
        raise bad_request(str(error)) from None
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
    await response.prepare(request)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_answered(number, single, answering, headers)) for number, single in enumerate(requests)
        ]
        await _send(response, tasks)
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, tasks: Sequence[asyncio.Task[bytes]]) -> None:
    """Write the answers as they become ready; answers that are ready at the same time are written together."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await response.write(b"".join(task.result() for task in done))


async def _answered(
    number: int, request: GroupedRequest, answering: Answering, headers: Callable[[Version], dict[str, str]]
) -> bytes:
    try:
        body, version = await answering(request.path, CIMultiDict(request.headers), request.body)
        answer = GroupedAnswer(number, 200, headers(version), body)
    except ApiError as error:
        answer = GroupedAnswer(number, error.status, error.headers(), pack_body({"error": error.body()}))
    except Exception as error:
        log.exception("request_failed", path=request.path)
        failure = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
        answer = GroupedAnswer(number, failure.status, {}, pack_body({"error": failure.body()}))
    return pack_answer(answer)
