"""Passes the sampled tokens of a batch step from its worker thread to listeners on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_mq.engines.generation.pause import PauseControl, Spans
from trinity_mq.engines.generation.request import Completion, GenerationRequest, ScoreRequest, Token
from trinity_mq.engines.state import EngineState
from trinity_mq.messages import Version
from trinity_mq.telemetry.trace import batch_at_work


class TokenStream:
    """The tokens of one request as they are sampled: await :meth:`begun`, then iterate."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Done after the last token was put."""
        self._news: asyncio.Queue[Version | list[Token] | None] = asyncio.Queue()
        self.answer.add_done_callback(lambda _: self._news.put_nowait(None))

        self._has_begun = self.has_tokens = False

    def begin(self, version: Version) -> None:
        """Pass on the sampling version, once. A batch step that failed without a token is computed again and calls this
        again.
        """
        if not self._has_begun:
            self._has_begun = True
            self.put(version)

    def put(self, news: Version | list[Token]) -> None:
        """Pass on the sampling version as the first item, then lists of tokens."""
        self.has_tokens = self.has_tokens or isinstance(news, list)
        self._news.put_nowait(news)

    async def begun(self) -> Version:
        """Wait until the batch step starts, and return the version that samples.

        Raises:
            ApiError: The batch step will not start.
        """
        first = await self._news.get()
        if not isinstance(first, tuple):
            await self.answer
            raise RuntimeError("a batch step ended that never began")
        return first

    async def __aiter__(self) -> AsyncIterator[list[Token]]:
        """Yield the tokens received since the last iteration, until all completions are finished.

        Raises:
            ApiError: The batch step failed.
        """
        over = False
        while not over:
            tokens: list[Token] = []
            news = await self._news.get()
            while True:
                if news is None:
                    over = True
                    break
                tokens += [token for token in news if isinstance(token, Token)]
                if self._news.empty():
                    break
                news = self._news.get_nowait()
            if tokens:
                yield tokens
        await self.answer


@contextlib.contextmanager
def token_stream(state: EngineState, pin: Version | None) -> Iterator[TokenStream]:
    """Yield a stream for the block; leaving the block early cancels the answer.

    Raises:
        ApiError: The engine cannot serve this now.
    """
    if problem := state.problem(pin):
        raise problem
    stream = TokenStream()
    try:
        yield stream
    finally:
        if stream.answer.done() and not stream.answer.cancelled():
            stream.answer.exception()  # marks the exception as retrieved: the reader has seen it or has left
        stream.answer.cancel()


@dataclass(slots=True, eq=False)
class Job:
    """One request in the queue for a batch step."""

    request: GenerationRequest | ScoreRequest
    pin: Version | None
    answer: asyncio.Future[Any]
    stream: TokenStream | None = None
    batch: int | str | None = field(default_factory=batch_at_work)
    since: float = field(default_factory=time.monotonic)
    part: int = 0
    """Part of a divided batch step; the jobs of a part are computed apart from other jobs. 0: the job is not in a part.
    """

    @property
    def sequences(self) -> int:
        """Sequences that the job adds to the batch."""
        return self.request.n if isinstance(self.request, GenerationRequest) else 1


class BatchListener:
    """Listener for the generating ``jobs`` of a batch step; its methods are called in the worker thread."""

    def __init__(
        self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop, pause_control: PauseControl, spans: Spans
    ) -> None:
        """Create the listener. ``spans`` starts with the first version of the batch step and grows when the version
        changes.
        """
        self._jobs, self._loop, self._pause_control, self._spans = jobs, loop, pause_control, spans
        self._changed: Version | None = None

    def listens(self, request: int) -> bool:
        """Return whether the request is streamed."""
        return self._jobs[request].stream is not None

    def left(self, request: int) -> bool:
        """Return whether no caller waits for the answer any more."""
        return self._jobs[request].answer.done()

    def between(self, step: int) -> None:
        """Pause or end the batch step here if the pause control requires it."""
        self._changed = self._pause_control.between(step, self._spans) or self._changed

    def sampled(self, tokens: list[Token]) -> None:
        """Hand the tokens of one decode step to the event loop."""
        if self._changed is not None:
            tokens, self._changed = [replace(token, version=self._changed) for token in tokens], None
        self._loop.call_soon_threadsafe(self._deliver, tokens)

    def _deliver(self, tokens: list[Token]) -> None:
        by_request: dict[int, list[Token]] = {}
        for token in tokens:
            by_request.setdefault(token.request, []).append(token)
        for number, news in by_request.items():
            stream = self._jobs[number].stream
            if stream is not None:
                stream.put(news)


def with_versions(completion: Completion, spans: Spans) -> Completion:
    """Return a completion of a batch step with the versions of its tokens if the weights changed during the step."""
    if len(spans) == 1:
        return completion
    length = len(completion.token_ids)
    return replace(completion, versions=tuple((first, *version) for first, version in spans if first < length))
