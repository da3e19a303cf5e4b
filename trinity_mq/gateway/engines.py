"""Sends calls to engines. Engines are chosen by load and health; a session stays on its engine, and moves to another
engine if its own is lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import aiohttp
from tenacity import AsyncRetrying

from trinity_mq.models.clients import EngineClients, engine_error, stream_error, with_version
from trinity_mq.models.errors import EngineLost, EngineRefused
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.sse import AnswerAssembler, EventReader, SurrogateRepairer
from trinity_mq.models.request_groups import CONNECT_SECONDS
from trinity_mq.models.retried import engine_retries
from trinity_mq.runtime.event_loop import loop_time

DONE = b"[DONE]"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
NEW_FIELDS = frozenset({"continue_messages"})
"""Request fields that engines of release 0.2.0 refuse, and without which an engine can serve the request too."""
OLD_ENGINE_SECONDS = 60.0
"""Seconds for which a request to an engine is sent without a field that the engine has refused. Afterwards the field is
tried again, because an engine of another release may have this address."""

T = TypeVar("T")


class Choice(Protocol):
    """Engine selection; see :class:`trinity_mq.models.engine_selection.EngineSelector`."""

    def __call__(self, prefer: str = "") -> InferenceModel: ...

    def lost(self, engine: InferenceModel) -> None: ...


class Stream:
    """A streamed answer: its chunks on arrival, and the whole answer at the end."""

    def __init__(self, response: aiohttp.ClientResponse, model: InferenceModel, url: str) -> None:
        self.response, self.model, self._url = response, model, url
        self._gathered = AnswerAssembler()
        self._named: dict[str, Any] = {}
        with_version(self._named, response.headers)
        self._gathered.add(self._named)
        self._usage: Any = None

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks on arrival.

        Raises:
            EngineError: The stream reports an error or is interrupted.
        """
        reader, mender, ended = EventReader(), SurrogateRepairer(), b""
        try:
            async for data in self.response.content.iter_any():
                ended = (ended + data)[-64:]
                for chunk in reader.feed(data):
                    if not isinstance(chunk, dict):
                        continue
                    if chunk.get("error"):
                        raise stream_error(chunk["error"], self._url)
                    self._usage = chunk.get("usage") or self._usage
                    mender.mend(chunk)
                    self._gathered.add(chunk)
                    yield chunk
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineLost(f"{self._url}: {type(error).__name__}: {error}", self.model) from error
        if DONE not in ended:
            raise EngineLost(f"{self._url}: the stream ended early", self.model)

    def answer(self) -> dict[str, Any]:
        """Return the answer received so far, in the format of an answer without streaming."""
        answer = self._gathered.answer()
        return answer if self._usage is None else {**answer, "usage": self._usage}


class EngineCalls:
    """Sends requests to the engines of a run.

    Args:
        choose: Chooses the engine of a request.
        clients: Connections to engines.
        not_ready_timeout: Seconds to wait for an engine with weights.
        request_timeout: Seconds for one answer.
        headers: Headers of every request.
        try_others: Retry after an engine was lost. ``choose`` may then return another engine.
    """

    def __init__(
        self,
        choose: Choice,
        clients: EngineClients,
        *,
        not_ready_timeout: float,
        request_timeout: float,
        headers: Mapping[str, str] | None = None,
        try_others: bool = True,
    ) -> None:
        self._choose, self._clients = choose, clients
        self._not_ready_timeout, self._request_timeout = not_ready_timeout, request_timeout
        self._headers, self._try_others = dict(headers or {}), try_others
        self._refused: dict[tuple[str, str], float] = {}
        """Time of the last refusal by URL of the engine and field."""

    async def ask(
        self, path: str, body: Mapping[str, Any], prefer: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[dict[str, Any], InferenceModel]:
        """Return the answer to a request, and the engine that gave it.

        Args:
            path: Route on the engine.
            body: Body of the request. Its ``model`` is filled in here.
            prefer: Id of the preferred engine. The engine selection may choose another engine.
            headers: Headers of this request, in addition to the headers of every request.

        Raises:
            EngineNotReady: No engine had weights in time.
            EngineLost: No engine answered.
            EngineRefused: The engine cannot serve this request.
        """

        async def once() -> tuple[dict[str, Any], InferenceModel]:
            model = self._choose(prefer)
            url, all_headers = model.url + path, {**self._headers, **headers}
            with self._reported(model):
                answer = await self._without_refused(
                    model, body, lambda sent: self._clients.post_async(url, sent, all_headers, self._request_timeout)
                )
            return answer, model

        reply: tuple[dict[str, Any], InferenceModel] = await self._patiently()(once)
        return reply

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], prefer: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncIterator[Stream]:
        """Begin a streamed answer and keep it open while the context lasts. Arguments and errors are the same as for
        :meth:`ask`. After the stream has begun, no other engine can continue it.
        """

        async def begin() -> Stream:
            model = self._choose(prefer)
            all_headers = {**self._headers, **headers}
            with self._reported(model):
                return await self._without_refused(model, body, lambda sent: self._open(model, path, sent, all_headers))

        stream: Stream = await self._patiently()(begin)
        async with stream.response:
            yield stream

    async def _open(
        self, model: InferenceModel, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Stream:
        url = model.url + path
        limit = aiohttp.ClientTimeout(total=self._request_timeout, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._clients.open_async(url, body, headers, limit)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{url}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return Stream(response, model, url)
        async with response:
            text = await response.read()
        try:
            error_body = json.loads(text)
        except ValueError:
            error_body = {}
        raise engine_error(response.status, response.headers.get("Retry-After"), error_body, url)

    async def _without_refused(
        self, model: InferenceModel, body: Mapping[str, Any], send: Callable[[dict[str, Any]], Awaitable[T]]
    ) -> T:
        """Return the result of ``send`` for the body of a request to ``model``. A field of :data:`NEW_FIELDS` that the
        engine refuses, because it is of an older release, is left out of this request and of later requests.
        """
        now = loop_time()
        self._refused = {key: at for key, at in self._refused.items() if now - at < OLD_ENGINE_SECONDS}
        refused = {name for name in NEW_FIELDS if (model.url, name) in self._refused}
        sent = {name: value for name, value in body.items() if name not in refused} | {"model": model.name}
        try:
            return await send(sent)
        except EngineRefused as error:
            name = error.param
            if error.code != "unknown_option" or name not in NEW_FIELDS or name not in sent:
                raise
        self._refused[model.url, name] = now
        del sent[name]
        return await send(sent)

    def _patiently(self) -> AsyncRetrying:
        return AsyncRetrying(**engine_retries(self._not_ready_timeout, others=self._try_others))

    @contextmanager
    def _reported(self, model: InferenceModel) -> Iterator[None]:
        """Tell the engine selection about an engine that did not answer."""
        try:
            yield
        except EngineLost as error:
            error.engine = model
            self._choose.lost(model)
            raise
