"""OpenAI clients of a wrapped model: they wait for an engine without weights, raise our typed errors, and are recorded.

Recording happens below the client, on the bytes from the engine. Therefore everything built on the client is recorded
in the same way: streams, ``parse``, raw responses, ``with_options``, and agent frameworks that use the client.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx2
import openai
from tenacity import AsyncRetrying, Retrying

from trinity_mq.models.clients import engine_error, with_version
from trinity_mq.models.errors import EngineLost, PromptTooLong
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.calls import RecordedCall, RecordedModel, Recording
from trinity_mq.models.retried import engine_retries

API_KEY = "none"  # engines need no key, but the client requires one
SAMPLING = ("/chat/completions", "/completions")
"""Path suffixes of requests whose answers are sampled."""


def recorded_client(wrapper: RecordedModel) -> openai.OpenAI:
    """Return a synchronous client of the wrapper's model."""
    client = openai.OpenAI(http_client=RecordingClient(wrapper), **_settings(wrapper))
    _name_model(client, wrapper.model)
    return client


def recorded_async_client(wrapper: RecordedModel) -> openai.AsyncOpenAI:
    """Return an asynchronous client of the wrapper's model."""
    client = openai.AsyncOpenAI(http_client=AsyncRecordingClient(wrapper), **_settings(wrapper))
    _name_model(client, wrapper.model)
    return client


class RecordingClient(openai.DefaultHttpxClient):
    """HTTP client for one wrapped model. Sampled answers are recorded as their bytes pass."""

    def __init__(self, wrapper: RecordedModel) -> None:
        super().__init__(**_connection(wrapper))
        self._wrapper = wrapper

    def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request, and record a sampled answer."""
        if not _samples(request):
            return self._sent(request, stream, options)
        call = RecordedCall(self._wrapper, json.loads(request.read()), tokens=self._wrapper.enable_history)

        def attempt() -> httpx2.Response:
            response = self._sent(_rewritten(request, call), True, options)
            if response.status_code != 200:
                response.read()
                _refused(response, call)
            return response

        response: httpx2.Response = Retrying(**engine_retries(self._wrapper.not_ready_timeout))(attempt)
        if (recording := _recording(response, call)) is not None:
            response.stream = RecordedStream(response.stream, recording, request.url, self._wrapper.model)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    def _sent(self, request: httpx2.Request, stream: bool, options: Mapping[str, Any]) -> httpx2.Response:
        try:
            return super().send(request, stream=stream, **options)
        except httpx2.TransportError as error:  # a timeout is also a TransportError
            raise _lost(request.url, error, self._wrapper.model) from error


class AsyncRecordingClient(openai.DefaultAsyncHttpxClient):
    """:class:`RecordingClient` for an event loop."""

    def __init__(self, wrapper: RecordedModel) -> None:
        super().__init__(**_connection(wrapper))
        self._wrapper = wrapper

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request, and record a sampled answer."""
        if not _samples(request):
            return await self._sent(request, stream, options)
        call = RecordedCall(self._wrapper, json.loads(await request.aread()), tokens=self._wrapper.enable_history)

        async def attempt() -> httpx2.Response:
            response = await self._sent(_rewritten(request, call), True, options)
            if response.status_code != 200:
                await response.aread()
                _refused(response, call)
            return response

        response: httpx2.Response = await AsyncRetrying(**engine_retries(self._wrapper.not_ready_timeout))(attempt)
        if (recording := _recording(response, call)) is not None:
            response.stream = RecordedStream(response.stream, recording, request.url, self._wrapper.model)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response

    async def _sent(self, request: httpx2.Request, stream: bool, options: Mapping[str, Any]) -> httpx2.Response:
        try:
            return await super().send(request, stream=stream, **options)
        except httpx2.TransportError as error:  # a timeout is also a TransportError
            raise _lost(request.url, error, self._wrapper.model) from error


class RecordedStream(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The bytes of an answer, recorded as they pass; iterated synchronously or asynchronously, like ``inner``."""

    def __init__(self, inner: Any, recording: Recording, url: httpx2.URL, model: InferenceModel) -> None:
        self._inner, self._recording, self._url, self._model = inner, recording, url, model

    def __iter__(self) -> Iterator[bytes]:
        with self._recorded():
            for data in self._inner:
                self._recording.feed(data)
                yield data
        self._recording.end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._recorded():
            async for data in self._inner:
                self._recording.feed(data)
                yield data
        self._recording.end()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            self._recording.forget()
            raise _lost(self._url, error, self._model) from error

    def close(self) -> None:
        try:
            self._recording.close()
        finally:
            self._inner.close()

    async def aclose(self) -> None:
        try:
            self._recording.close()
        finally:
            await self._inner.aclose()


def _name_model(client: openai.OpenAI | openai.AsyncOpenAI, model: InferenceModel) -> None:
    """Set the default of the argument ``model`` of ``create``, because the engine serves only one model. Also set the
    attribute ``model_path`` of the client: the model's folder, which the engine accepts as the model's name, or its
    name.
    """
    vars(client)["model_path"], name = model.model_path or model.name, model.name
    for resource in (client.chat.completions, client.completions):
        vars(resource)["create"] = functools.wraps(resource.create)(functools.partial(resource.create, model=name))


def _settings(wrapper: RecordedModel) -> dict[str, Any]:
    return {
        "base_url": f"{wrapper.model.url}/v1",
        "api_key": API_KEY,
        "default_headers": wrapper.headers,
        "timeout": wrapper.request_timeout,
        "max_retries": 0,  # retries are ours: a 503 is retried, a lost engine is not
    }


def _connection(wrapper: RecordedModel) -> dict[str, Any]:
    """Return the connection arguments of an HTTP client."""
    # no proxy reaches an engine, and loading certificates, which plain HTTP does not use, takes 30 ms
    return {"trust_env": False, "verify": False} if wrapper.model.url.startswith("http://") else {}


def _samples(request: httpx2.Request) -> bool:
    return request.method == "POST" and request.url.path.endswith(SAMPLING)


def _rewritten(request: httpx2.Request, call: RecordedCall) -> httpx2.Request:
    """Return the request with the wrapper's parameters, for one attempt."""
    headers = httpx2.Headers(request.headers)
    # the bytes are parsed on the way, so they must not be compressed
    headers.update({**call.headers, "Accept-Encoding": "identity"})
    for name in ("Content-Length", "Transfer-Encoding"):
        headers.pop(name, None)
    return httpx2.Request(request.method, request.url, headers=headers, json=call.body, extensions=request.extensions)


def _refused(response: httpx2.Response, call: RecordedCall) -> None:
    """Raise our error for HTTP status 409 and 503. All other errors are left to the OpenAI client.

    A prompt that is too long is handled in both places: the client raises, and the history, if it is enabled, gets the
    masked experiences.
    """
    try:
        answer = response.json()
    except ValueError:
        answer = None
    error = engine_error(response.status_code, response.headers.get("Retry-After"), answer, str(response.url))
    if response.status_code in {409, 503}:
        raise error
    if isinstance(error, PromptTooLong):
        call.too_long(error)


def _recording(response: httpx2.Response, call: RecordedCall) -> Recording | None:
    """Return the recorder for the answer; None if the answer is not recorded."""
    if response.status_code != 200:
        return None
    named = with_version({}, response.headers)
    if not call.recorded:
        call.note_version(named)
        return None
    streamed = response.headers.get("Content-Type", "").startswith("text/event-stream")
    return call.recording(named, streamed=streamed)


def _lost(url: httpx2.URL, error: Exception, model: InferenceModel) -> EngineLost:
    return EngineLost(f"{url}: {type(error).__name__}: {error}", model)
