"""Sends requests to vLLM, which batches them itself: admits and counts requests, and holds them during a pause.

``VllmBatcher`` has the methods of :class:`~trinity_mq.engines.generation.batch_step.StaticBatcher`, which the API and
the admin routes use. :class:`Choices` assembles a streamed answer choice by choice, and detects stop strings as tokens
arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from trinity_mq.engines.api_errors import ApiError, bad_request, not_current, stopping
from trinity_mq.engines.generation.batch_step import HOLD_SECONDS, Counters, PauseMode
from trinity_mq.engines.generation.request import (
    Alternatives,
    Completion,
    FinishReason,
    GenerationRequest,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.generation.stopping import TAIL_SLACK, Decode, cut, stop_in, without_stop_token
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.generation.token_stream import TokenStream, token_stream
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.adapters import VllmAdapters
from trinity_mq.engines.vllm.client import BUSY, REFUSED, VllmClient
from trinity_mq.messages import Version
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

T = TypeVar("T")

SEED_MASK = (1 << 63) - 1
READ_USE_EVERY = 5.0
"""Seconds between two readings of vLLM's use of its batch and its KV cache."""
MAX_REMOVED = 0.05
"""Maximum probability that a grammar may remove at a token's place. Above it, the token does not count as the model's
choice.
"""


class RequestAborted(Exception):
    """A pause aborted the request; it may be sent again after the pause."""


@dataclass(frozen=True, slots=True)
class ServingWeights:
    """The weights that answer a request."""

    version: Version
    adapter: str | None
    """Name of the LoRA adapter, which stays loaded as long as the request runs. None: the weights are in the model, and
    may change.
    """


class VllmBatcher:
    """Sends all requests of one engine. ``pause_mode`` decides the treatment of running requests when new weights come:

    ``wait``: they finish first. ``keep``: they continue with the new weights, and each token is labelled with its
    weight version. ``abort``: they restart with the new weights. Tokens already streamed stay: with ``keep`` and with
    ``abort`` a stream is cut off before new weights come and resumed from its current end, so that the weight version
    of each token is known.

    With ``adapters``, ``pause_mode`` has no effect: running requests continue with the adapter with which they began.
    """

    def __init__(
        self,
        client: VllmClient,
        state: EngineState,
        codec: TextCodec,
        *,
        max_sequences: int,
        pause_mode: PauseMode = "wait",
        hold: float = HOLD_SECONDS,
        adapters: VllmAdapters | None = None,
        routed_layers: Sequence[int] = (),
    ) -> None:
        """Create the batcher. ``routed_layers``: numbers of the layers whose experts completions carry."""
        self._routed_layers = routed_layers
        self.counters = Counters()
        self.max_sequences = max_sequences
        self._client, self._state, self._codec = client, state, codec
        self._mode, self._hold = pause_mode, hold
        self._adapters = adapters
        self._changed = Notifier() if adapters is None else adapters.changed
        self._commands = asyncio.Lock()
        self._waiting = self._under_way = 0
        self._busy_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborts = 0
        """Number of pauses that aborted requests."""
        self._scoring = asyncio.Semaphore(max_sequences)
        self._streams = 0
        self._streamless = asyncio.Event()
        self._streamless.set()
        self._weights_come = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def load(self) -> int:
        """Number of sequences that are being generated or are waiting."""
        return self._waiting + self._under_way

    async def generate(
        self, requests: Sequence[GenerationRequest], pin: Version | None
    ) -> list[tuple[list[Completion], Version]]:
        """Return the completions of each request, with the oldest version that sampled them.

        Raises:
            ApiError: The engine cannot serve this now, or vLLM failed.
        """
        return await run_concurrently([self._generated(request, pin) for request in requests])

    async def score(self, requests: Sequence[ScoreRequest], pin: Version | None) -> list[tuple[list[float], Version]]:
        """Return the logprobs of each request, with their weight version; errors as :meth:`generate`."""
        return await run_concurrently([self._scored(request, pin) for request in requests])

    @contextlib.asynccontextmanager
    async def stream(self, request: GenerationRequest, pin: Version | None) -> AsyncIterator[TokenStream]:
        """Yield the tokens of one request as they are sampled. Leaving the block early ends the sampling.

        Raises:
            ApiError: The engine cannot serve this now.
        """
        with token_stream(self._state, pin) as stream:
            # no TaskGroup: exceptions of the block must not be wrapped
            sampling = asyncio.create_task(self._run_stream(request, pin, stream), name="token-stream")
            try:
                yield stream
            finally:
                sampling.cancel()
                await asyncio.wait({sampling})

    async def idle(self) -> None:
        """Return when weights may be received; the class describes the treatment of running requests."""
        if self._adapters is not None:
            return
        if self._mode != "wait":
            self._weights_come.set()
            try:
                await self._streamless.wait()
            finally:
                self._weights_come.clear()
        if self._mode == "keep":
            return
        if self._mode == "abort" and self._under_way:
            self._aborts += 1
            await self._client.post(api.PAUSE, mode="abort", clear_cache="false")
            await self._client.post(api.RESUME)
        await self._idle.wait()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a command of the weight sync after earlier commands; it continues if the caller is cancelled."""

        async def command() -> T:
            async with self._commands:
                return await work()

        return await asyncio.shield(command())

    async def run(self) -> None:
        """Serve until :meth:`close`. Reads vLLM's use of its batch and its KV cache from time to time."""
        while not self._closed.is_set():
            self.counters.use = await self._client.use()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_USE_EVERY):
                    await self._closed.wait()

    async def close(self, grace: float) -> None:
        """Send no more requests, and wait up to ``grace`` seconds for the running requests."""
        self._closed.set()
        self._state.running.set()
        self._changed.notify()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests_cut_off", after_seconds=grace, sequences=self._under_way)

    # -- internals

    def _has_room(self) -> bool:
        return self._adapters is None or self._adapters.has_room or self._closed.is_set()

    @contextlib.asynccontextmanager
    async def _admitted(self, sequences: int, pin: Version | None) -> AsyncIterator[ServingWeights]:
        """Wait until a request may be sent; yield the weights that answer it. Count the request during the block."""
        self._waiting += sequences
        try:
            async with asyncio.timeout(self._hold):
                # another pause may begin while this waits for room
                while not (self._state.running.is_set() and self._has_room()):
                    await self._state.running.wait()
                    await self._changed.until(self._has_room)
        except TimeoutError:
            why = "paused" if self._adapters is None else "paused, or busy with older adapters,"
            raise not_current(f"the engine has been {why} for {self._hold:g} s; retry, or use another engine") from None
        finally:
            self._waiting -= sequences
        if self._closed.is_set():
            raise stopping()
        if problem := self._state.problem(pin):
            raise problem
        version = self._state.version
        assert version is not None  # problem() passes only a current engine
        loop = asyncio.get_running_loop()
        if not self._under_way:
            self._busy_since = loop.time()
        self._under_way += sequences
        self._idle.clear()
        try:
            with contextlib.nullcontext() if self._adapters is None else self._adapters.in_use() as adapter:
                yield ServingWeights(version, adapter)
            self.counters.batch_steps += 1
            self.counters.sequences += sequences
        finally:
            self._under_way -= sequences
            if not self._under_way:
                self._idle.set()
                self.counters.busy_seconds += loop.time() - self._busy_since

    @contextlib.contextmanager
    def _abortable(self) -> Iterator[None]:
        """Raise RequestAborted if vLLM refuses a request of the block because a pause aborted requests: from version
        0.33 it does not queue requests that arrive during such a pause.
        """
        aborts = self._aborts
        try:
            yield
        except ApiError as error:
            if error.code != BUSY or aborts == self._aborts:
                raise
            raise RequestAborted from error

    async def _generated(self, request: GenerationRequest, pin: Version | None) -> tuple[list[Completion], Version]:
        _check_options(request)
        if problem := self._state.problem(pin):
            raise problem
        is_scored = request.top_p < 1 or request.marks_constrained
        while True:
            try:
                async with self._admitted(request.n, pin) as served:
                    with self._abortable():
                        choices = await self._complete(request, served)
                    if served.adapter and is_scored:
                        choices = [(await self._untruncated(request, choice, pin, served))[0] for choice in choices]
            except RequestAborted:
                continue
            if any(choice.aborted for choice in choices):
                continue
            versions = [choice.versions or ((0, *served.version),) for choice in choices]
            sampled_by = {(span[1], span[2]) for spans in versions for span in spans}
            if max(sampled_by) > served.version:
                await self._committed(max(sampled_by))
            if pin is not None and sampled_by != {pin}:  # the pinned weights were replaced in a pause
                raise self._state.problem(pin) or not_current(
                    "the weights that this request is pinned to were replaced"
                )
            if not is_scored or served.adapter:
                break
            scored = [await self._untruncated(request, choice, pin) for choice in choices]
            if sampled_by == {scorer for _, scorer in scored}:
                choices = [choice for choice, _ in scored]
                break  # else new weights came in between: these logprobs are not from the weights that sampled
        self.counters.tokens += sum(len(choice.token_ids) for choice in choices)
        completions = [
            self._completion(request, choice, spans) for choice, spans in zip(choices, versions, strict=True)
        ]
        return completions, min((span[1], span[2]) for spans in versions for span in spans)

    async def _complete(self, request: GenerationRequest, served: ServingWeights) -> list[api.VllmCompletion]:
        if request.temperature == 0 and request.n > 1:  # vLLM refuses n identical greedy samples
            return await self._complete(replace(request, n=1), served) * request.n
        if request.stop:
            choices = Choices(request, self._codec.decode, None)
            await self._read_events(request, served, choices)
            return choices.result()
        body = api.generate_body(request, api.label(served.version), served.adapter)
        with _grammar_refused(request):
            return api.read_choices(await self._client.post(api.GENERATE, body), request.top_logprobs)

    async def _read_events(
        self, request: GenerationRequest, served: ServingWeights, choices: Choices, only: int | None = None
    ) -> None:
        """Read an answer as it is sampled; stop strings are detected here, because vLLM decodes no tokens."""
        body = api.generate_body(request, api.label(served.version), served.adapter, stream=True)
        # vLLM reports the version of each token only at the very end
        to_the_end = self._mode == "keep" and not choices.streamed and served.adapter is None
        with _grammar_refused(request):
            async with contextlib.aclosing(self._client.events(api.GENERATE, body)) as events:
                async for event in events:
                    choices.take(event, only)
                    if choices.ended(only) and not to_the_end:
                        break

    async def _run_stream(self, request: GenerationRequest, pin: Version | None, stream: TokenStream) -> None:
        try:
            # with top_p, logprobs are known only at the end; at temperature 0, all choices are the same; a grammar
            # cannot be resumed in the middle of an answer
            if request.top_p < 1 or (request.temperature == 0 and request.n > 1) or request.grammar:
                completions, version = await self._generated(request, pin)
                stream.put(version)
                stream.put(stream_tokens(completions, version))
            else:
                await self._sample_stream(request, pin, stream)
            if not stream.answer.done():
                stream.answer.set_result(None)
        except Exception as error:
            if not stream.answer.done():
                stream.answer.set_exception(error)

    async def _sample_stream(self, request: GenerationRequest, pin: Version | None, stream: TokenStream) -> None:
        choices = Choices(request, self._codec.decode, stream)
        while not choices.all_ended:
            parts = choices.rest()
            async with self._admitted(sum(part.n for _, part in parts), pin) as served, self._streaming():
                choices.begin(served.version)
                work = run_concurrently([self._read_events(part, served, choices, only) for only, part in parts])
                cut_off = await run_until_set(self._weights_come, work)
            if choices.strayed:
                raise not_current("the weights changed during the stream without a new version; retry")
            if choices.aborted or not (cut_off or choices.all_ended):
                raise ApiError(500, "vLLM did not finish the stream; retry", code="generation_failed")
        self.counters.tokens += choices.tokens

    @contextlib.asynccontextmanager
    async def _streaming(self) -> AsyncIterator[None]:
        """Count the block as a stream, for which :meth:`idle` waits."""
        self._streams += 1
        self._streamless.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self._streamless.set()

    async def _committed(self, newest: Version) -> None:
        """Wait until the newest version that sampled an answer is committed; raise ApiError if it will not be
        committed.
        """
        if self._state.version == newest or not self._state.paused:
            return
        await self._state.running.wait()
        if self._state.version is None or self._state.version < newest:
            raise not_current("the weights that sampled this answer were not committed; retry, or use another engine")

    async def _untruncated(
        self,
        request: GenerationRequest,
        choice: api.VllmCompletion,
        pin: Version | None,
        served: ServingWeights | None = None,
    ) -> tuple[api.VllmCompletion, Version]:
        """Return the choice with logprobs before truncation and with the places that its grammar decided, and their
        weight version. vLLM returns logprobs after truncation, among the tokens that the grammar allows.
        """
        sequence = ScoreRequest([*request.prompt, *choice.token_ids], request.temperature or 1.0)
        scores, version = await self._scored(sequence, pin, served, len(request.prompt))
        logprobs = scores if request.top_p < 1 else choice.logprobs
        constrained = constrained_places(choice.logprobs, scores, request.top_p) if request.grammar else ()
        return replace(choice, logprobs=logprobs, constrained=constrained), version

    async def _scored(
        self, request: ScoreRequest, pin: Version | None, held: ServingWeights | None = None, first: int = 1
    ) -> tuple[list[float], Version]:
        """Return the logprobs of the tokens from index ``first`` on, and their weight version. ``held``: weights that
        already answer the request; None: the weights that are served next.
        """
        while True:
            try:
                async with contextlib.nullcontext(held) if held else self._admitted(1, pin) as served:
                    with self._abortable():
                        scores = await self._scores(request, first, served)
                return scores, served.version
            except RequestAborted:
                continue

    async def _scores(self, request: ScoreRequest, first: int, served: ServingWeights) -> list[float]:
        """Return the logprobs of the tokens from index ``first`` on.

        vLLM scores whole prompts at temperature 1 only. At another temperature each token has its own request, which
        finds the tokens before it in vLLM's prefix cache. At most ``max_sequences`` requests are sent at a time.

        Raises:
            RequestAborted: A pause aborted a request, or other weights answered it.
        """
        tokens, temperature = request.token_ids, request.temperature or 1.0
        weights = api.label(served.version), served.adapter
        if temperature == 1:
            answer = await self._score(api.score_body(tokens, *weights), served)
            return api.read_scores(answer, tokens)[first - 1 :]

        async def score(end: int) -> float:
            async with self._scoring:
                body = api.token_score_body(tokens[:end], tokens[end], temperature, *weights)
                return api.read_token_score(await self._score(body, served), tokens[end])

        last = await score(len(tokens) - 1)  # this request fills the cache for all others
        return [*await run_concurrently([score(end) for end in range(first, len(tokens) - 1)]), last]

    async def _score(self, body: Mapping[str, Any], served: ServingWeights) -> Mapping[str, Any]:
        answer = await self._client.post(api.GENERATE, body)
        [sampled] = api.read_choices(answer)
        if sampled.aborted or any(span[1:] != served.version for span in sampled.versions):
            raise RequestAborted
        return answer

    def _completion(
        self, request: GenerationRequest, choice: api.VllmCompletion, versions: tuple[tuple[int, int, int], ...]
    ) -> Completion:
        [text] = self._codec.decode([without_stop_token(choice.token_ids, request.stop_ids)])
        experts = None
        if self._routed_layers and choice.routed_experts is not None:
            tokens = len(request.prompt) + len(choice.token_ids) - 1
            experts = api.read_routed_experts(choice.routed_experts, tokens, self._routed_layers)
        return Completion(
            choice.token_ids,
            choice.logprobs,
            cut(text, request.stop),
            "stop" if choice.stopped else "length",
            versions,
            stop_in(text, request.stop),
            experts,
            choice.top_logprobs,
            choice.constrained,
        )


def constrained_places(sampled: Sequence[float], scores: Sequence[float], top_p: float = 1.0) -> tuple[int, ...]:
    """Return the places of tokens at which a grammar removed more than :data:`MAX_REMOVED` of the model's probability.

    The share depends on the tokens before a place, not on the token that was sampled there. A policy gradient that
    leaves these places out therefore does not favour any of the tokens that the model chose itself.

    Args:
        sampled: Logprobs among the allowed tokens, after truncation.
        scores: Logprobs of the same tokens among all tokens.
        top_p: Truncation, which removes at most ``1 - top_p``.
    """
    limit = -math.log((1 - MAX_REMOVED) * top_p)
    return tuple(
        place for place, (inside, overall) in enumerate(zip(sampled, scores, strict=True)) if inside - overall > limit
    )


def _check_options(request: GenerationRequest) -> None:
    """Raise ApiError if top_p < 1 comes with an option for which the logprobs before truncation would be unknown."""
    for option in ("logit_bias", "min_tokens", "top_logprobs"):
        if request.top_p < 1 and getattr(request, option):
            raise bad_request(
                f"{option} and top_p={request.top_p:g} cannot be combined on the engine vllm, which does not report "
                "logprobs before truncation; send top_p=1, or leave the option out",
                option,
                "unsupported_option",
            )


@contextlib.contextmanager
def _grammar_refused(request: GenerationRequest) -> Iterator[None]:
    """Convert vLLM's refusal of the request's grammar to a 400 error."""
    try:
        yield
    except ApiError as error:
        if not request.grammar or error.code != REFUSED:
            raise
        raise bad_request(
            f"the JSON schema of the request, or of its tools, is refused: {error}; simplify the schema",
            code="invalid_schema",
        ) from error


async def run_concurrently(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the other coroutines and is raised without an exception
    group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_until_set(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Run ``work`` until ``event`` is set. Return True if it was cut off, False if it finished; its exceptions are
    raised.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.wait({waiting, working})
    if working.cancelled():
        return True
    working.result()
    return False


@dataclass(slots=True)
class _Row:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    ended: str | None = None
    versions: tuple[tuple[int, int, int], ...] = ()
    by: Version | None = None
    """Weight version of the last token, if the version may change during sampling."""


class Choices:
    """Collects the events of one request; tokens beyond a stop string are left out.

    A request that is cut off can continue: :meth:`rest` returns the requests for its remaining tokens.
    """

    def __init__(self, request: GenerationRequest, decode: Decode, stream: TokenStream | None) -> None:
        self._stops, self._decode, self._stream = request.stop, decode, stream
        self._tail = max(map(len, request.stop), default=0) + TAIL_SLACK
        self._request = request
        self._rows = [_Row() for _ in range(request.n)]
        self._by: Version | None = None
        self.strayed = False
        """True if a token has another version than the version of the last :meth:`begin`."""

    @property
    def all_ended(self) -> bool:
        """Whether no choice wants more tokens."""
        return all(row.ended for row in self._rows)

    @property
    def aborted(self) -> bool:
        """Whether vLLM aborted a choice."""
        return any(row.ended == "abort" for row in self._rows)

    @property
    def streamed(self) -> bool:
        """Whether the answer is streamed to a listener."""
        return self._stream is not None

    @property
    def tokens(self) -> int:
        """Number of tokens sampled so far."""
        return sum(len(row.token_ids) for row in self._rows)

    def begin(self, version: Version) -> None:
        """Stamp all further tokens with ``version``. A listener receives the first version before the first token, and
        a later version with the next token.
        """
        for row in self._rows:
            row.by = row.by or version
            row.versions = ()
        if self._by is None and self._stream is not None:
            self._stream.put(version)
        self._by = version

    def ended(self, index: int | None) -> bool:
        """Return whether choice ``index`` is complete; None: whether all choices are."""
        return self.all_ended if index is None else self._rows[index].ended is not None

    def rest(self) -> list[tuple[int | None, GenerationRequest]]:
        """Return the remaining requests: the whole request while no token has come, then one request per unfinished
        choice from its current end.
        """
        if not self.tokens and not any(row.ended for row in self._rows):
            return [(None, self._request)]
        return [(index, self._continued(index, row)) for index, row in enumerate(self._rows) if not row.ended]

    def _continued(self, index: int, row: _Row) -> GenerationRequest:
        original, length = self._request, len(row.token_ids)
        # the same seed would draw the same numbers again
        seed = None if original.seed is None else (original.seed + (length << 24) + (index << 48)) & SEED_MASK
        prompt = [*original.prompt, *row.token_ids]
        return replace(
            original,
            prompt=prompt,
            max_tokens=original.max_tokens - length,
            min_tokens=max(original.min_tokens - length, 0),
            n=1,
            seed=seed,
        )

    def take(self, event: Mapping[str, Any], only: int | None = None) -> None:
        """Add the tokens of one event, and pass them on to the listener. ``only`` is the index of the choice if it was
        requested alone.
        """
        news: list[Token] = []
        for part in event["choices"]:
            index = part["index"] if only is None else only
            row = self._rows[index]
            row.versions = api.read_versions(part) or row.versions
            self.strayed |= self._by is not None and any(run[1:] != self._by for run in row.versions)
            if row.ended:
                continue
            count = self._request.top_logprobs
            tops = api.read_alternatives(part, count) or [()] * len(part["token_ids"] or ())
            tokens = list(zip(part["token_ids"] or (), api.read_logprobs(part), tops, strict=True))
            for position, (token, logprob, top) in enumerate(tokens, 1):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.top_logprobs.append(top)
                if self._stops and self._complete(row):
                    row.ended = "stop"
                elif position == len(tokens):
                    row.ended = part["finish_reason"]
                news.append(Token(0, index, token, logprob, _reason(row.ended), self._change(row), top))
                if row.ended:
                    break
            if not tokens:
                row.ended = part["finish_reason"]
        if news and self._stream is not None:
            self._stream.put(news)

    def result(self) -> list[api.VllmCompletion]:
        """Return the choices collected so far."""
        return [
            api.VllmCompletion(
                row.token_ids,
                row.logprobs,
                stopped=row.ended == "stop",
                aborted=row.ended == "abort",
                versions=tuple(span for span in row.versions if span[0] < len(row.token_ids)),
                top_logprobs=row.top_logprobs,
            )
            for row in self._rows
        ]

    def _change(self, row: _Row) -> Version | None:
        """Return the version of the newest token if it differs from the version of the token before it."""
        if row.by == self._by:
            return None
        row.by = self._by
        return self._by

    def _complete(self, row: _Row) -> bool:
        [text] = self._decode([row.token_ids[-self._tail :]])
        return any(stop in text for stop in self._stops)


def _reason(ended: str | None) -> FinishReason | None:
    if ended is None:
        return None
    return "stop" if ended == "stop" else "length"


def stream_tokens(completions: Sequence[Completion], announced: Version) -> list[Token]:
    """Return the tokens that one stream would have delivered. ``announced`` is the version announced at its start."""
    tokens = []
    for number, completion in enumerate(completions):
        changes = {first: (generation, step) for first, generation, step in completion.versions}
        last, constrained = len(completion.token_ids) - 1, frozenset(completion.constrained)
        for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            version = changes.get(position)
            if position == 0 and version == announced:
                version = None
            ended = completion.finish_reason if position == last else None
            top = completion.top_logprobs[position] if completion.top_logprobs else ()
            is_constrained = position in constrained
            tokens.append(Token(0, number, token, logprob, ended, version, top, is_constrained))
    return tokens
