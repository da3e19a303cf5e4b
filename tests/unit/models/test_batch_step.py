"""The queue in front of the model, with a generator that records what it is given."""

import asyncio
import contextlib
import copy
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.batch_step import PauseMode, StaticBatcher
from trinity_mq.engines.generation.pause import PauseControl, Spans
from trinity_mq.engines.generation.request import (
    Completion,
    GenerationListener,
    GenerationRequest,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.messages import Version


class Recorder:
    """Answers at once, or when told to."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.cancelled = False
        self.fail = False

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        self.rounds.append(len(requests))
        self.threads.add(threading.current_thread().name)
        self.started.set()
        assert self.gate.wait(10)
        if self.fail or self.cancelled:
            raise RuntimeError("out of memory")
        return [[Completion([1], [0.0], "", "stop")] * request.n for request in requests]

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        return [[-1.0] * (len(request.token_ids) - 1) for request in requests]

    def cancel(self) -> None:
        self.cancelled = True
        self.gate.set()


ASK = GenerationRequest(prompt=[3], max_tokens=1, n=4)


@contextlib.asynccontextmanager
async def running(
    recorder: Recorder, *, max_sequences: int = 1000, max_delay: float = 0.005, hold: float = 60.0
) -> AsyncIterator[tuple[StaticBatcher, EngineState]]:
    state = EngineState()
    state.phase, state.version = "current", (1, 2)
    rounds = StaticBatcher(recorder, state, max_sequences=max_sequences, max_delay=max_delay, hold=hold)
    async with asyncio.TaskGroup() as group:
        group.create_task(rounds.run())
        try:
            yield rounds, state
        finally:
            state.resume()
            recorder.gate.set()
            await rounds.close(5.0)


async def test_requests_that_come_together_share_a_round_off_the_loop() -> None:
    recorder = Recorder()
    async with running(recorder) as (rounds, _):
        answers = await asyncio.gather(
            *(rounds.generate([ASK], None) for _ in range(5)), rounds.score([ScoreRequest([1, 2])], None)
        )
    assert recorder.rounds == [5]
    assert recorder.threads != {threading.current_thread().name}
    assert [version for [(_, version)] in answers] == [(1, 2)] * 6
    assert rounds.counters.sequences == 21
    assert rounds.counters.tokens == 20
    assert rounds.load == 0


async def test_a_round_takes_no_more_than_max_batch_sequences() -> None:
    recorder = Recorder()
    async with running(recorder, max_sequences=10) as (rounds, _):
        await asyncio.gather(*(rounds.generate([ASK], None) for _ in range(5)))
        big = GenerationRequest(prompt=[3], max_tokens=1, n=20)
        await rounds.generate([big], None)
    assert recorder.rounds == [2, 2, 1, 1]


async def test_while_paused_requests_wait_and_a_pin_is_checked_when_their_round_starts() -> None:
    recorder = Recorder()
    async with running(recorder) as (rounds, state):
        state.pause(60.0)
        asked = [asyncio.create_task(rounds.generate([ASK], pin)) for pin in (None, None, (1, 2))]
        await asyncio.sleep(0.05)
        assert recorder.rounds == []
        state.touch()
        state.applied = True
        state.commit((1, 3), 9)
        assert [version for [(_, version)] in await asyncio.gather(*asked[:2])] == [(1, 3), (1, 3)]
        with pytest.raises(ApiError, match=r"pinned to version 1\.2, the engine holds 1\.3"):
            await asked[2]
    assert recorder.rounds == [2]


async def test_a_pause_without_end_is_not_waited_for() -> None:
    async with running(Recorder(), hold=0.05) as (rounds, state):
        state.pause(60.0)
        with pytest.raises(ApiError, match="has been paused") as caught:
            await rounds.generate([ASK], None)
        assert caught.value.status == 503


async def test_closing_finishes_the_round_and_refuses_what_waits() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    async with running(recorder) as (rounds, _):
        asked = asyncio.create_task(rounds.generate([ASK], None))
        await asyncio.to_thread(recorder.started.wait)
        late = asyncio.create_task(rounds.generate([ASK], None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(rounds.close(5.0))
        await asyncio.sleep(0.02)
        recorder.gate.set()
        assert await asked
        await closing
        with pytest.raises(ApiError, match="shutting down"):
            await late
    assert recorder.rounds == [1]


async def test_closing_cuts_off_a_round_that_takes_too_long() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    async with running(recorder) as (rounds, _):
        asked = asyncio.create_task(rounds.generate([ASK], None))
        await asyncio.to_thread(recorder.started.wait)
        await rounds.close(0.05)
        assert recorder.cancelled
        with pytest.raises(ApiError, match="shutting down"):
            await asked


class Poisoned(Recorder):
    """Fails on every batch step that holds a request for the token 13."""

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        answers = super().generate(requests, listener)
        for number, request in enumerate(requests):
            if listener is not None and listener.listens(number) and request.prompt == [3]:
                listener.sampled([Token(number, 0, 1, 0.0, "stop")])
        if any(request.prompt == [13] for request in requests):
            raise RuntimeError("this request is not for me")
        return answers


@pytest.mark.parametrize("place", [0, 3, 6])
async def test_a_request_that_fails_its_round_fails_alone(place: int) -> None:
    recorder = Poisoned()
    requests = [GenerationRequest(prompt=[4], max_tokens=1) for _ in range(7)]
    requests[place] = GenerationRequest(prompt=[13], max_tokens=1)
    async with running(recorder) as (rounds, _):
        recorder.gate.clear()
        first = asyncio.create_task(rounds.generate([ASK], None))
        await asyncio.to_thread(recorder.started.wait, 10)
        others = [asyncio.create_task(rounds.generate([request], None)) for request in requests]
        await asyncio.sleep(0)
        recorder.gate.set()
        answers = await asyncio.gather(first, *others, return_exceptions=True)
    failed = [number for number, answer in enumerate(answers[1:]) if isinstance(answer, BaseException)]
    assert failed == [place]
    assert "this request is not for me" in str(answers[1 + place])
    assert max(recorder.rounds) == 7, "they did share a round"


async def test_a_stream_without_a_token_begins_again_where_another_request_failed() -> None:
    recorder = Poisoned()
    async with running(recorder) as (rounds, _), rounds.stream(GenerationRequest([4], 1), None) as stream:
        with pytest.raises(ApiError, match="this request is not for me"):
            await rounds.generate([GenerationRequest(prompt=[13], max_tokens=1)], None)
        assert await stream.begun() == (1, 2)
        assert [tokens async for tokens in stream] == []
        assert stream.answer.exception() is None
    assert recorder.rounds == [2, 1, 1]


async def test_a_stream_that_has_tokens_cannot_begin_again() -> None:
    async with running(Poisoned()) as (rounds, _), rounds.stream(GenerationRequest([3], 1), None) as stream:
        with pytest.raises(ApiError):
            await rounds.generate([GenerationRequest(prompt=[13], max_tokens=1)], None)
        with pytest.raises(ApiError, match="generation failed"):
            [tokens async for tokens in stream]


async def test_a_request_without_a_number_fails_alone() -> None:
    class Nan(Recorder):
        def generate(
            self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
        ) -> list[list[Completion]]:
            return [
                [Completion([1], [math.nan if request.prompt == [13] else 0.0], "", "stop")] for request in requests
            ]

    async with running(Nan()) as (rounds, _):
        asked = (rounds.generate([GenerationRequest(prompt=[each], max_tokens=1)], None) for each in (4, 13))
        good, bad = await asyncio.gather(*asked, return_exceptions=True)
    assert not isinstance(good, BaseException)
    assert "the logprob of a token of this request is not a number" in str(bad)


# -- new weights while a batch step runs, on a real small model: it is paused and goes on (keep), or restarts (abort)


OLD, NEW = (1, 2), (1, 3)
AT = 5
PROMPT = [3, 4, 5]
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=12, n=2, seed=7)


class At(PauseControl):
    """Begins the sync's pause when the batch step is before step :data:`AT`, and lets the batch step wait there."""

    def __init__(self, report_paused: Callable[[float], None], mode: PauseMode) -> None:
        super().__init__(report_paused)
        self._mode, self.begun = mode, asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def between(self, step: int, spans: Spans) -> Version | None:
        if step == AT and len(spans) == 1 and not self.begun.is_set():
            self.hold() if self._mode == "keep" else self.cut()
            self._loop.call_soon_threadsafe(self.begun.set)
        return super().between(step, spans)


class PausedBatcher(StaticBatcher):
    """A batcher with the pause of :class:`At`."""

    def __init__(self, *args: Any, pause_mode: PauseMode, **how: Any) -> None:
        super().__init__(*args, pause_mode=pause_mode, **how)
        self.at = self._pause_control = At(self._report_paused, pause_mode)


@contextlib.asynccontextmanager
async def serving(generator: TextGenerator, mode: PauseMode) -> AsyncIterator[tuple[StaticBatcher, EngineState, At]]:
    state = EngineState()
    state.phase, state.version = "current", OLD
    batcher = PausedBatcher(generator, state, max_sequences=100, max_delay=0.0, pause_mode=mode)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(batcher.run())
        try:
            yield batcher, state, batcher.at
        finally:
            await batcher.close(5.0)
            running.cancel()


def other_weights(generator: TextGenerator) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(weight.shape, generator=made) * 0.1 + float(weight.dim() == 1)
        for name, weight in named_weights(generator.model).items()
    }


async def sync(
    batcher: StaticBatcher, state: EngineState, generator: TextGenerator, weights: dict[str, torch.Tensor]
) -> None:
    """What the admin routes do."""
    state.pause(30.0)
    await batcher.idle()
    checked = await batcher.call(lambda: generator.check(weights))
    state.touch()
    await batcher.call(lambda: generator.apply(checked))
    state.applied = True
    state.commit(NEW, 1)


def reference(before: Any, after: Any, tokens: list[int]) -> torch.Tensor:
    """Logprobs of ``tokens``: the context up to token AT - 1 read by ``before``, the rest by ``after``."""
    ids, cut = torch.tensor([[*PROMPT, *tokens]]), len(PROMPT) + AT - 1
    cache = DynamicCache(config=before.config)
    with torch.no_grad():
        first = before(ids[:, :cut], past_key_values=cache, use_cache=True).logits
        rest = after(ids[:, cut:], past_key_values=cache, use_cache=True).logits
    distribution = torch.cat([first, rest], 1)[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    return distribution.gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def test_a_round_that_is_kept_goes_on_under_the_new_weights_and_its_tokens_say_so(
    generator: TextGenerator,
) -> None:
    before = copy.deepcopy(generator.model)
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        scored = asyncio.ensure_future(batcher.score([ScoreRequest(PROMPT)], None))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        [(completions, oldest)] = await asked
        await scored
    assert oldest == OLD
    for completion in completions:
        assert len(completion.token_ids) > AT, "another seed: it must be longer than the pause comes late"
        assert completion.versions == ((0, *OLD), (AT, *NEW))
        wanted = reference(before, generator.model, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=0)


async def test_a_stream_that_is_kept_says_where_the_weights_changed(generator: TextGenerator) -> None:
    tokens: list[Token] = []
    async with serving(generator, "keep") as (batcher, state, pause_control), batcher.stream(REQUEST, None) as stream:
        assert await stream.begun() == OLD
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        async for news in stream:
            tokens += news
    for choice in range(REQUEST.n):
        versions = [token.version for token in tokens if token.choice == choice]
        assert [place for place, version in enumerate(versions) if version] == [AT]
        assert versions[AT] == NEW


async def test_a_round_that_is_aborted_begins_anew_under_the_new_weights(generator: TextGenerator) -> None:
    async with serving(generator, "abort") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        [(completions, version)] = await asked
        [again] = generator.generate([REQUEST])
    assert version == NEW
    assert [one.token_ids for one in completions] == [one.token_ids for one in again]


async def test_a_stream_that_is_aborted_ends_with_an_error_that_says_why(generator: TextGenerator) -> None:
    async with serving(generator, "abort") as (batcher, state, pause_control), batcher.stream(REQUEST, None) as stream:
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        with pytest.raises(ApiError, match="new weights arrived"):
            async for _ in stream:
                pass


async def test_a_round_kept_through_a_sync_that_fails_untouched_goes_on_as_it_was(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        state.pause(30.0)
        await batcher.idle()
        state.resume()
        [(completions, version)] = await asked
        [plain] = generator.generate([REQUEST])
    assert version == OLD
    assert [(one.token_ids, one.versions) for one in completions] == [(one.token_ids, ()) for one in plain]


async def test_a_round_whose_weights_are_gone_is_not_finished_by_what_is_there(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], None))
        await pause_control.begun.wait()
        state.pause(30.0)
        await batcher.idle()
        state.touch()
        state.resume()
        with pytest.raises(ApiError, match="waits for weights"):
            await asked


async def test_a_kept_answer_to_a_request_pinned_to_the_old_version_is_refused(generator: TextGenerator) -> None:
    async with serving(generator, "keep") as (batcher, state, pause_control):
        asked = asyncio.ensure_future(batcher.generate([REQUEST], OLD))
        await pause_control.begun.wait()
        await sync(batcher, state, generator, other_weights(generator))
        with pytest.raises(ApiError, match="pinned to version"):
            await asked
