"""The queue in front of the model, with a generator that records what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.batch_step import StaticBatcher
from trinity_mq.engines.generation.request import (
    Completion,
    GenerationListener,
    GenerationRequest,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.state import EngineState


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
    recorder: Recorder, *, max_sequences: int = 1000, max_delay: float = 0.005, hold: float = 60.0, grace: float = 5.0
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
            await rounds.close(grace)


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
