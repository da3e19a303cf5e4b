"""Requests on their way to vLLM, which batches them by itself: admitted like a round's, counted, held at a pause.

Has the methods of :class:`~trinity_mq.models.engines.rounds.Rounds`, which the API and the admin routes use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from trinity_mq.messages import Version
from trinity_mq.models.engines import vllm_api as api
from trinity_mq.models.engines.api_errors import bad_request, not_current, stopping
from trinity_mq.models.engines.feeds import Feed
from trinity_mq.models.engines.requests import Completion, GenerationRequest, ScoreRequest, Token
from trinity_mq.models.engines.rounds import HOLD_SECONDS, Counters
from trinity_mq.models.engines.state import EngineState
from trinity_mq.models.engines.stopping import cut, without_end
from trinity_mq.models.engines.text import TextCodec
from trinity_mq.models.engines.vllm_choices import Choices
from trinity_mq.models.engines.vllm_client import PauseMode, VllmClient

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Flow:
    """All requests of one engine. What ``pause_mode`` means for those under way when weights come:

    ``wait``: they end first. ``keep``: they go on with the new weights, and their tokens say which weights each is of.
    ``abort``: they begin anew with the new weights.
    """

    def __init__(
        self,
        client: VllmClient,
        state: EngineState,
        codec: TextCodec,
        *,
        vocabulary: int,
        max_sequences: int,
        pause_mode: PauseMode = "wait",
        hold: float = HOLD_SECONDS,
    ) -> None:
        self.counters = Counters()
        self.max_sequences = max_sequences
        self._client, self._state, self._codec = client, state, codec
        self._vocabulary, self._mode, self._hold = vocabulary, pause_mode, hold
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tmq-vllm")  # commands, one after the other
        self._waiting = self._under_way = 0
        self._busy_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = asyncio.Event()

    @property
    def load(self) -> int:
        """Sequences being generated or waiting."""
        return self._waiting + self._under_way

    async def generate(
        self, requests: Sequence[GenerationRequest], pin: Version | None
    ) -> list[tuple[list[Completion], Version]]:
        """Return the completions of each request, with the oldest version that sampled them.

        Raises:
            ApiError: The engine cannot serve this now, or vLLM failed.
        """
        return await _together([self._generated(request, pin) for request in requests])

    async def score(self, requests: Sequence[ScoreRequest], pin: Version | None) -> list[tuple[list[float], Version]]:
        """Return the logprobs of each request, with the version they are of; errors as :meth:`generate`."""
        return await _together([self._scored(request, pin) for request in requests])

    @contextlib.asynccontextmanager
    async def stream(self, request: GenerationRequest, pin: Version | None) -> AsyncIterator[Feed]:
        """Hand out the tokens of one request as they are sampled; leaving the block early ends the sampling.

        Raises:
            ApiError: The engine cannot serve this now.
        """
        if problem := self._state.problem(pin):
            raise problem
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        feed = Feed(answer)
        # no TaskGroup: what the block raises must come out as it is
        feeding = asyncio.create_task(self._feed(request, pin, feed, answer), name="feed")
        try:
            yield feed
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at: whoever iterated has had it, whoever left does not want it
            answer.cancel()

    async def idle(self) -> None:
        """Return when weights may be received: see the class for what happens to requests under way."""
        if self._mode == "keep":
            return
        if self._mode == "abort" and self._under_way:
            await self._client.post(api.PAUSE, mode="abort", clear_cache="false")
            await self._client.post(api.RESUME)
        await self._idle.wait()

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def run(self) -> None:
        """Serve until :meth:`close`."""
        await self._closed.wait()
        self._worker.shutdown(wait=False)

    async def close(self, grace: float) -> None:
        """Send nothing more; give what is under way ``grace`` seconds."""
        self._closed.set()
        self._state.running.set()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests_cut_off", after_seconds=grace, sequences=self._under_way)

    # -- inside

    @contextlib.asynccontextmanager
    async def _admitted(self, sequences: int, pin: Version | None) -> AsyncIterator[Version]:
        """Enter when a request may be sent: with which version, if it is not kept running through a pause."""
        self._waiting += sequences
        try:
            async with asyncio.timeout(self._hold):
                await self._state.running.wait()
        except TimeoutError:
            raise not_current(
                f"the engine has been paused for {self._hold:g} s; ask again, or use another engine"
            ) from None
        finally:
            self._waiting -= sequences
        if self._closed.is_set():
            raise stopping()
        if problem := self._state.problem(pin):
            raise problem
        version = self._state.version
        assert version is not None  # only a current engine passes
        loop = asyncio.get_running_loop()
        if not self._under_way:
            self._busy_since = loop.time()
        self._under_way += sequences
        self._idle.clear()
        try:
            yield version
            self.counters.rounds += 1
            self.counters.sequences += sequences
        finally:
            self._under_way -= sequences
            if not self._under_way:
                self._idle.set()
                self.counters.busy_seconds += loop.time() - self._busy_since

    async def _generated(self, request: GenerationRequest, pin: Version | None) -> tuple[list[Completion], Version]:
        if problem := self._state.problem(pin):
            raise problem
        while True:
            async with self._admitted(request.n, pin) as version:
                choices = await self._asked(request, version)
            if not any(choice.aborted for choice in choices):
                break
        versions = [choice.versions or ((0, *version),) for choice in choices]
        await self._committed(max((span[1], span[2]) for spans in versions for span in spans))
        if request.top_p < 1:
            choices = [await self._untruncated(request, choice, pin) for choice in choices]
        self.counters.tokens += sum(len(choice.token_ids) for choice in choices)
        completions = [
            self._completion(request, choice, spans) for choice, spans in zip(choices, versions, strict=True)
        ]
        return completions, min((span[1], span[2]) for spans in versions for span in spans)

    async def _asked(self, request: GenerationRequest, version: Version) -> list[api.Choice]:
        if request.temperature == 0 and request.n > 1:  # vLLM refuses what would be the same n times
            return await self._asked(replace(request, n=1), version) * request.n
        if request.stop:
            return await self._followed(request, version, None)
        answer = await self._client.post(api.GENERATE, api.generate_body(request, api.label(version)))
        return api.read_choices(answer)

    async def _followed(self, request: GenerationRequest, version: Version, feed: Feed | None) -> list[api.Choice]:
        """Read an answer as it is sampled; stop strings are looked for here, since vLLM has no tokenizer."""
        choices = Choices(request, self._codec.decode, feed)
        body = api.generate_body(request, api.label(version), stream=True)
        async with contextlib.aclosing(self._client.events(api.GENERATE, body)) as events:
            async for event in events:
                choices.take(event)
                # which weights made which tokens is said at the very end only
                if choices.all_ended and self._mode != "keep":
                    break
        return choices.result()

    async def _feed(
        self, request: GenerationRequest, pin: Version | None, feed: Feed, answer: asyncio.Future[Any]
    ) -> None:
        try:
            # with top_p, logprobs are known at the end; at temperature 0, all choices are one
            if request.top_p < 1 or (request.temperature == 0 and request.n > 1):
                completions, version = await self._generated(request, pin)
                feed.put(version)
                feed.put(_as_tokens(completions))
            else:
                await self._fed(request, pin, feed)
            if not answer.done():
                answer.set_result(None)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)

    async def _fed(self, request: GenerationRequest, pin: Version | None, feed: Feed) -> None:
        async with self._admitted(request.n, pin) as version:
            feed.put(version)
            choices = await self._followed(request, version, feed)
        if any(choice.aborted for choice in choices):
            raise not_current("new weights have come while this was streamed; ask again")
        if any(span[1:] != version for choice in choices for span in choice.versions):
            raise not_current("weights changed while this was streamed, under its version's name; ask again")
        self.counters.tokens += sum(len(choice.token_ids) for choice in choices)

    async def _committed(self, newest: Version) -> None:
        """Return when the newest version that sampled an answer is committed, or raise if it never will be."""
        if self._state.version == newest or not self._state.paused:
            return
        await self._state.running.wait()
        if self._state.version is None or self._state.version < newest:
            raise not_current("the weights that sampled this were not committed; ask again, or use another engine")

    async def _untruncated(self, request: GenerationRequest, choice: api.Choice, pin: Version | None) -> api.Choice:
        """Return the choice with the logprobs before truncation: vLLM gives those after it."""
        whole = ScoreRequest([*request.prompt, *choice.token_ids], request.temperature or 1.0)
        scores, _ = await self._scored(whole, pin)
        return replace(choice, logprobs=scores[len(request.prompt) - 1 :])

    async def _scored(self, request: ScoreRequest, pin: Version | None) -> tuple[list[float], Version]:
        heat = request.temperature or 1.0
        if heat != 1 and len(request.token_ids) * self._vocabulary > api.SCORED_AT_ONCE:
            raise bad_request(
                f"logprobs of {len(request.token_ids)} tokens at temperature {heat:g} need {self._vocabulary} logprobs "
                f"for each, more than {api.SCORED_AT_ONCE} together: vLLM scores given tokens at temperature 1 only. "
                "Use temperature 1, or the transformers engine",
                "temperature",
                "unsupported_option",
            )
        async with self._admitted(1, pin) as version:
            body = api.score_body(request.token_ids, heat, api.label(version))
            answer = await self._client.post(api.GENERATE, body)
        scores = api.read_scores(answer, request.token_ids, heat)
        sampled = api.read_choices(answer)[0].versions
        newest = max(((span[1], span[2]) for span in sampled), default=version)
        await self._committed(newest)
        return scores, newest

    def _completion(
        self, request: GenerationRequest, choice: api.Choice, versions: tuple[tuple[int, int, int], ...]
    ) -> Completion:
        [text] = self._codec.decode([without_end(choice.token_ids, request.stop_ids)])
        return Completion(
            choice.token_ids,
            choice.logprobs,
            cut(text, request.stop) if request.stop else text,
            "stop" if choice.stopped else "length",
            versions,
        )


def _as_tokens(completions: Sequence[Completion]) -> list[Token]:
    return [
        Token(0, number, token, logprob, completion.finish_reason if place == len(completion.token_ids) else None)
        for number, completion in enumerate(completions)
        for place, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True), 1)
    ]


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what each returns, in order; the first failure ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
