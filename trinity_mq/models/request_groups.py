"""Sends requests made at about the same time to an engine as one group, if the engine takes groups.

A slice requests the answers to one question, and a runner works on many slices. Without groups each of these requests
would be an HTTP request of its own, with the work of an HTTP server and client for a few hundred bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import structlog

from trinity_mq.models.errors import EngineLost
from trinity_mq.models.group_format import (
    CONTENT_TYPE,
    GROUP_PATH,
    AnswerReader,
    GroupedAnswer,
    pack_group,
)

log = structlog.get_logger(__name__)

GATHER_SECONDS = 0.001
"""Seconds from the first request of a group until the group is sent. An engine itself waits longer for requests to
batch.
"""
CONNECT_SECONDS = 10.0


class GroupsNotSupported(Exception):
    """The server does not take groups, or does not take them any more. Send each request on its own."""


@dataclass(slots=True)
class _PendingRequest:
    request: bytes
    answer: asyncio.Future[GroupedAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RequestGroups:
    """Collects the requests to one server, on one event loop, and sends them in groups.

    Args:
        session: Returns the HTTP session to use.
        base: Base URL of the server, without a path.
    """

    def __init__(self, session: Callable[[], aiohttp.ClientSession], base: str) -> None:
        self._session, self._base = session, base
        self._gathering: list[_PendingRequest] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def ask(self, request: bytes) -> GroupedAnswer:
        """Return the answer to a packed request.

        A caller that is cancelled loses only its own answer. When no caller waits for the group any more, its
        connection is closed, which tells the engine to drop its requests.

        Raises:
            EngineLost: The engine did not answer.
            GroupsNotSupported: The server does not take groups.
        """
        pending = _PendingRequest(request)
        if not self._gathering:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send)
        self._gathering.append(pending)
        return await pending.answer

    async def close(self) -> None:
        """Cancel the groups under way and drop the requests that wait for a group; their callers get EngineLost."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._fail(self._gathering, EngineLost(f"{self._base}: the connections were closed"))

    def _send(self) -> None:
        gathered, self._gathering = [pending for pending in self._gathering if not pending.answer.done()], []
        if not gathered:
            return
        task = asyncio.create_task(self._exchange(gathered), name="request group")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        answers = [pending.answer for pending in gathered]

        def all_are_done(_: object) -> None:
            if any(answer.cancelled() for answer in answers):
                task.cancel()  # cancelling closes the connection, and the engine drops the unanswered requests

        asyncio.gather(*answers, return_exceptions=True).add_done_callback(all_are_done)

    async def _exchange(self, group: list[_PendingRequest]) -> None:
        """Send a group and deliver its answers. Every request that still waits gets an answer or an error."""
        url = self._base + GROUP_PATH
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        data, headers = pack_group([pending.request for pending in group]), {"Content-Type": CONTENT_TYPE}
        try:
            async with self._session().post(url, data=data, headers=headers, timeout=limit) as response:
                if response.status != 200:
                    self._fail(group, GroupsNotSupported(f"{url}: HTTP status {response.status}"))
                    return
                reader = AnswerReader()
                # read to the end, so that the connection can serve the next group
                async for chunk in response.content.iter_any():
                    for answer in reader.feed(chunk):
                        self._hand_out(group, answer)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._fail(group, EngineLost(f"{url}: {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            self._fail(group, EngineLost(f"{url}: the connections were closed"))
            raise
        except Exception as error:  # an error in our code: callers must not wait for ever
            log.exception("request_group_failed", url=url, requests=len(group))
            self._fail(group, EngineLost(f"{url}: {type(error).__name__}: {error}"))
        else:
            self._fail(group, EngineLost(f"{url}: the answer ended early"))

    @staticmethod
    def _hand_out(group: list[_PendingRequest], answer: GroupedAnswer) -> None:
        if not 0 <= answer.number < len(group):
            raise ValueError(f"an answer to request {answer.number} of {len(group)}")
        waiting = group[answer.number].answer
        if not waiting.done():
            waiting.set_result(answer)

    @staticmethod
    def _fail(group: list[_PendingRequest], error: Exception) -> None:
        for pending in group:
            if not pending.answer.done():
                pending.answer.set_exception(error)
