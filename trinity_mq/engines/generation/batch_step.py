"""Static batching: gathers concurrent requests, runs them as one batch step in the worker thread, and answers them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import structlog

from trinity_mq.engines.api_errors import ApiError, not_current, stopping
from trinity_mq.engines.generation.pause import BatchStepAborted, PauseControl, Spans
from trinity_mq.engines.generation.request import Completion, GenerationListener, GenerationRequest, ScoreRequest
from trinity_mq.engines.generation.token_stream import BatchListener, Job, TokenStream, token_stream, with_versions
from trinity_mq.engines.state import EngineState
from trinity_mq.messages import EngineUse, Version
from trinity_mq.telemetry.trace import record, shared_span

log = structlog.get_logger(__name__)

T = TypeVar("T")
PauseMode = Literal["wait", "keep", "abort"]
"""Treatment of a batch step when new weights come. ``wait``: the step finishes first. ``keep``: the step is paused and
continues under the new weights. ``abort``: the step is cut off and restarts under the new weights; its streamed
requests fail instead. The engine vllm treats its running requests in the same way, but resumes streams.
"""
GATHER_AT_MOST = 10
"""A stream of arrivals delays a batch step by at most this many times ``max_delay``."""
HOLD_SECONDS = 60.0
"""Maximum seconds for which requests wait for a pause to end."""


class Generator(Protocol):
    """Computes completions and scores, in the worker thread."""

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return the logprobs of each request."""

    def cancel(self) -> None:
        """Make the running computation raise soon."""


@dataclass(slots=True)
class Counters:
    """Work of the engine since its start."""

    batch_steps: int = 0
    """Number of finished batch steps. In the engine vllm, which batches by itself: number of finished requests."""
    sequences: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    malformed_calls: int = 0
    """Tool calls that began but could not be read."""
    use: EngineUse | None = None
    """Last use of batch and KV cache that the engine's server reported."""


class StaticBatcher:
    """The queue in front of the model. :meth:`run` must be running."""

    def __init__(
        self,
        generator: Generator,
        state: EngineState,
        *,
        max_sequences: int,
        max_delay: float,
        hold: float = HOLD_SECONDS,
        pause_mode: PauseMode = "wait",
    ) -> None:
        self.counters = Counters()
        self.max_sequences = max_sequences
        self._generator, self._state = generator, state
        self._max_delay, self._hold = max_delay, hold
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tmq-batch-step")
        self._commands = ThreadPoolExecutor(1, thread_name_prefix="tmq-weights")
        self._pending: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._mode = pause_mode
        self._no_step_running = asyncio.Event()
        """Set while no decode step is being computed: between batch steps, and while a batch step is paused."""
        self._no_step_running.set()
        self._pause_control = PauseControl(self._report_paused)
        state.on_resume = self._resumed
        self._closing = False
        self._part = 0
        """Number of the latest part into which a failed batch step was divided."""
        self._running_sequences = 0

    @property
    def load(self) -> int:
        """Number of sequences that are being generated or are waiting."""
        return self._running_sequences + sum(job.sequences for job in self._pending)

    async def generate(
        self, requests: Sequence[GenerationRequest], pin: Version | None
    ) -> list[tuple[list[Completion], Version]]:
        """Return the completions of each request, with the version under which their batch step began.

        Raises:
            ApiError: The engine cannot serve this now, or the batch step failed.
        """
        return await self._submit(requests, pin)

    async def score(self, requests: Sequence[ScoreRequest], pin: Version | None) -> list[tuple[list[float], Version]]:
        """Return the logprobs of each request, with their weight version; errors as :meth:`generate`."""
        return await self._submit(requests, pin)

    @contextlib.asynccontextmanager
    async def stream(self, request: GenerationRequest, pin: Version | None) -> AsyncIterator[TokenStream]:
        """Yield the tokens of one request as they are sampled. Leaving the block early ends the sampling.

        Raises:
            ApiError: The engine cannot serve this now.
        """
        with token_stream(self._state, pin) as stream:
            self._pending.append(Job(request, pin, stream.answer, stream))
            self._arrived.set()
            yield stream

    async def _submit(
        self, requests: Sequence[GenerationRequest] | Sequence[ScoreRequest], pin: Version | None
    ) -> list[Any]:
        if problem := self._state.problem(pin):
            raise problem
        loop = asyncio.get_running_loop()
        jobs = [Job(request, pin, loop.create_future()) for request in requests]
        self._pending.extend(jobs)
        self._arrived.set()
        # a caller that disconnects cancels the futures, so that requests not yet started are dropped
        return await asyncio.gather(*(job.answer for job in jobs))

    async def idle(self) -> None:
        """Return when weights may be received. :data:`PauseMode` defines the treatment of a running batch step."""
        if self._mode == "keep":
            self._pause_control.hold()
            await self._no_step_running.wait()
            return
        if self._mode == "abort":
            self._pause_control.cut()
        await self._idle.wait()

    def _report_paused(self) -> None:
        """Report from the worker thread that the batch step is paused."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this event
            self._loop.call_soon_threadsafe(self._no_step_running.set)

    def _resumed(self) -> None:
        """Continue after a pause, under the present weights."""
        if not self._idle.is_set():
            self._no_step_running.clear()
        self._pause_control.release(self._state.version if self._state.phase == "current" else None)

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, between batch steps or while a batch step is paused."""

        def alone() -> T:
            with self._pause_control.model_in_use:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._commands, alone)

    async def run(self) -> None:
        """Serve until :meth:`close`."""
        try:
            while await self._wait_for_step():
                if jobs := self._take():
                    await self._run_step(jobs)
        finally:
            self._fail_pending(stopping())
            self._worker.shutdown(wait=False)
            self._commands.shutdown(wait=False)

    async def close(self, grace: float) -> None:
        """Start no more batch steps. Wait for the running batch step, and cut it off after ``grace`` seconds."""
        self._closing = True
        self._arrived.set()
        self._state.running.set()
        self._resumed()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.warning("batch_step_cut_off", after_seconds=grace, sequences=self._running_sequences)
            self._generator.cancel()

    async def _wait_for_step(self) -> bool:
        """Wait until a batch step may start: requests are pending, the batch is full or no request came for
        ``max_delay`` seconds, and the engine is not paused. Requests fail if a pause lasts too long. Return False when
        closing.
        """
        while not self._closing:
            if not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self._max_delay > 0:
                await self._wait_for_company()
            try:
                async with asyncio.timeout(self._hold):
                    await self._state.running.wait()
            except TimeoutError:
                self._fail_pending(
                    not_current(f"the engine has been paused for {self._hold:g} s; retry, or use another engine")
                )
            if not self._closing and self._pending:
                return True
        return False

    async def _wait_for_company(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + GATHER_AT_MOST * self._max_delay
        while not self._closing and sum(job.sequences for job in self._pending) < self.max_sequences:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(min(loop.time() + self._max_delay, latest)):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _take(self) -> list[Job]:
        """Return the jobs of the next batch step. Reject jobs that cannot be served, and drop jobs without a waiting
        caller.
        """
        jobs: list[Job] = []
        sequences = 0
        while self._pending:
            job = self._pending[0]
            if not job.answer.done():
                if problem := self._state.problem(job.pin):
                    job.answer.set_exception(problem)
                elif jobs and (sequences + job.sequences > self.max_sequences or job.part != jobs[0].part):
                    break
                else:
                    jobs.append(job)
                    sequences += job.sequences
            self._pending.popleft()
        return jobs

    async def _run_step(self, jobs: list[Job]) -> None:
        version = self._state.version
        assert version is not None  # only a current engine passes _take
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._loop = loop
        self._idle.clear()
        self._no_step_running.clear()
        self._pause_control.begin(version)
        spans: Spans = [(0, version)]
        self._running_sequences = sum(job.sequences for job in jobs)
        for job in jobs:
            record("wait for company", job.since, time.monotonic(), batch=job.batch, wait=True)
            if job.stream is not None:
                job.stream.begin(version)
        try:
            results = await loop.run_in_executor(self._worker, self._compute, jobs, loop, spans)
        except BatchStepAborted:
            self._restart_later(jobs)
        except Exception as error:
            if self._closing:  # close() cut it off
                failure = stopping()
            else:
                log.exception("batch_step_failed", requests=len(jobs), sequences=self._running_sequences)
                jobs = self._requeue_halves(jobs)
                failure = ApiError(500, f"generation failed: {type(error).__name__}: {error}", code="generation_failed")
            for job in jobs:
                if not job.answer.done():
                    job.answer.set_exception(failure)
        else:
            for job, result in zip(jobs, results, strict=True):
                if isinstance(job.request, GenerationRequest):
                    self.counters.tokens += sum(len(completion.token_ids) for completion in result)
                if not job.answer.done():
                    self._set_answer(job, result, spans)
            self.counters.batch_steps += 1
            self.counters.sequences += self._running_sequences
            self.counters.busy_seconds += loop.time() - started
        finally:
            self._running_sequences = 0
            self._idle.set()
            self._no_step_running.set()

    def _requeue_halves(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs of a failed batch step that fail now, and put the others back at the head of the queue.

        The requeued jobs form two parts that are computed apart, so that in the end the faulty job fails alone. The
        jobs that fail now are the only job of its step, or streams that have received tokens.
        """
        retried = [job for job in jobs if not job.answer.done() and (job.stream is None or not job.stream.has_tokens)]
        if len(jobs) == 1 or not retried:
            return jobs
        for half in (retried[len(retried) // 2 :], retried[: len(retried) // 2]):
            self._part += 1
            for job in reversed(half):
                job.part = self._part
                self._pending.appendleft(job)
        self._arrived.set()
        return [job for job in jobs if job not in retried]

    def _set_answer(self, job: Job, result: Any, spans: Spans) -> None:
        scored = isinstance(job.request, ScoreRequest)
        if not scored and any(math.isnan(math.fsum(completion.logprobs)) for completion in result):
            message = "generation failed: the logprob of a token of this request is not a number"
            job.answer.set_exception(ApiError(500, message, code="generation_failed"))
        elif job.pin is not None and len(spans) > 1 and (problem := self._state.problem(job.pin)):
            job.answer.set_exception(problem)  # some tokens are from another version than the pinned version
        elif scored:
            job.answer.set_result((result, spans[-1][1]))  # scores are computed after all sampling
        else:
            job.answer.set_result(([with_versions(completion, spans) for completion in result], spans[0][1]))

    def _restart_later(self, jobs: list[Job]) -> None:
        """Put the jobs of a batch step that was cut off back at the head of the queue."""
        log.info("batch_step_restarted_for_weights", requests=len(jobs))
        for job in reversed(jobs):
            if job.stream is not None and not job.answer.done():
                job.answer.set_exception(not_current("new weights arrived while this answer was streamed; retry"))
            elif not job.answer.done():
                self._pending.appendleft(job)
        self._arrived.set()

    def _compute(self, jobs: list[Job], loop: asyncio.AbstractEventLoop, spans: Spans) -> list[Any]:
        generating = [job for job in jobs if isinstance(job.request, GenerationRequest)]
        to_generate = [job.request for job in jobs if isinstance(job.request, GenerationRequest)]
        to_score = [job.request for job in jobs if isinstance(job.request, ScoreRequest)]
        generated: Iterator[list[Completion]] = iter(())
        scored: Iterator[list[float]] = iter(())
        with self._pause_control.model_in_use:
            if to_generate:
                listener = BatchListener(generating, loop, self._pause_control, spans)
                with shared_span("generate", _sequences_by_batch(generating)):
                    generated = iter(self._generator.generate(to_generate, listener))
            if to_score:
                scored = iter(self._generator.score(to_score))
        return [next(scored if isinstance(job.request, ScoreRequest) else generated) for job in jobs]

    def _fail_pending(self, error: ApiError) -> None:
        while self._pending:
            job = self._pending.popleft()
            if not job.answer.done():
                job.answer.set_exception(error)


def _sequences_by_batch(jobs: Sequence[Job]) -> Counter[int | str | None]:
    shares: Counter[int | str | None] = Counter()
    for job in jobs:
        shares[job.batch] += job.sequences
    return shares
