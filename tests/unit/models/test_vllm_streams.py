"""Streams of the vllm engine across new weights, on a vLLM that samples what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.test_vllm_flow import REQUEST, Letters, World, answer
from tests.waiting import until
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import GenerationRequest, Token
from trinity_mq.engines.server.openai.requests import CompletionBody
from trinity_mq.engines.server.openai.streaming import Chunks
from trinity_mq.messages import Version
from trinity_mq.models.recording.responses import experiences_of
from trinity_mq.models.recording.sse import AnswerAssembler

OLD, NEW = (1, 1), (1, 2)


class Telling:
    """Answers the first request with what it is given and no end, later ones with one more token and the end."""

    def __init__(self, world: World, first: list[tuple[int, int]]) -> None:
        self.first, self.closed = first, 0
        world.vllm.events = self.events  # type: ignore[method-assign]
        self.asked: list[Mapping[str, Any]] = []

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append(body)
        if len(self.asked) > 1:
            yield answer([7, 1], runs=((body["cache_salt"], 0, 2),))
            return
        try:
            for choice, token in self.first:
                event = answer([token])
                event["choices"][0] |= {"index": choice, "finish_reason": None, "weight_versions": None}
                yield event
            await asyncio.Event().wait()
        finally:
            self.closed += 1


class Reader:
    """Reads a stream to its end."""

    def __init__(self, world: World, request: GenerationRequest, pin: Version | None = None) -> None:
        self.request = request
        self.began: Version | None = None
        self.tokens: list[Token] = []
        self.task = asyncio.create_task(self._read(world, pin))

    async def _read(self, world: World, pin: Version | None) -> None:
        async with world.flow.stream(self.request, pin) as stream:
            self.began = await stream.begun()
            async for news in stream:
                self.tokens += news

    def of(self, choice: int) -> list[int]:
        return [token.token_id for token in self.tokens if token.choice == choice]


async def paused(world: World) -> None:
    world.state.pause(60.0)
    async with asyncio.timeout(5.0):
        await world.flow.idle()


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_stream_goes_on_with_new_weights_from_where_it_is(mode: str) -> None:
    world = World(mode)
    vllm = Telling(world, [(0, 2), (0, 3), (1, 4)])
    reader = Reader(world, replace(REQUEST, n=2, seed=3))
    await until(lambda: len(reader.tokens) == 3)
    await paused(world)
    assert (vllm.closed, len(vllm.asked)) == (1, 1), "it was cut off, and nothing is asked while weights come"
    world.new_weights()
    world.state.commit(NEW, 2)
    await reader.task
    assert (reader.began, reader.of(0), reader.of(1)) == (OLD, [2, 3, 7, 1], [4, 7, 1])
    changes = {(token.choice, token.token_id): token.version for token in reader.tokens if token.version}
    assert changes == {(0, 7): NEW, (1, 7): NEW}
    first, *rest = vllm.asked
    assert [body["token_ids"] for body in rest] == [[4, 4, 2, 3], [4, 4, 4]]
    sampling = [body["sampling_params"] for body in (first, *rest)]
    assert [(one["n"], one["max_tokens"]) for one in sampling] == [(2, 8), (1, 6), (1, 7)]
    assert len({one["seed"] for one in sampling}) == 3, "the same numbers are not drawn again"
    assert [body["cache_salt"] for body in vllm.asked] == ["1.1", "1.2", "1.2"]
    assert world.flow.counters.tokens == 7
    assert world.flow.load == 0


async def test_a_choice_that_has_ended_is_not_asked_for_again() -> None:
    world = World("keep")
    vllm = Telling(world, [(0, 2), (1, 3)])
    reader = Reader(world, replace(REQUEST, n=2, stop=("d",)))  # token 3 is d
    await until(lambda: len(reader.tokens) == 2)
    await paused(world)
    world.new_weights()
    world.state.commit(NEW, 2)
    await reader.task
    assert [body["token_ids"] for body in vllm.asked] == [[4, 4], [4, 4, 2]]
    assert (reader.of(0), reader.of(1)) == ([2, 7, 1], [3])


async def test_a_stream_of_which_nothing_has_come_is_wholly_of_the_new_weights() -> None:
    world = World("keep")
    vllm = Telling(world, [])
    reader = Reader(world, replace(REQUEST, seed=3))
    await until(lambda: len(vllm.asked) == 1 and reader.began is not None)
    await paused(world)
    world.new_weights()
    world.state.commit(NEW, 2)
    await reader.task
    assert [body["sampling_params"]["seed"] for body in vllm.asked] == [3, 3]
    assert [(token.token_id, token.version) for token in reader.tokens] == [(7, NEW), (1, None)]
    assert recorded(reader) == [(0, *NEW)]


async def test_what_is_recorded_of_a_stream_says_where_the_weights_changed() -> None:
    world = World("keep")
    Telling(world, [(0, 2), (0, 3)])
    reader = Reader(world, REQUEST)
    await until(lambda: len(reader.tokens) == 2)
    await paused(world)
    world.new_weights()
    world.state.commit(NEW, 2)
    await reader.task
    assert recorded(reader) == [(0, *OLD), (2, *NEW)]


async def test_waiting_lets_a_stream_end_first() -> None:
    world = World("wait")
    vllm = Telling(world, [(0, 2), (0, 3)])
    reader = Reader(world, replace(REQUEST, stop=("xyz",)))
    await until(lambda: len(reader.tokens) == 2)
    world.state.pause(60.0)
    idle = asyncio.create_task(world.flow.idle())
    await asyncio.wait({idle}, timeout=0.05)
    assert not idle.done()
    assert (vllm.closed, len(vllm.asked)) == (0, 1)
    reader.task.cancel()
    await asyncio.wait_for(idle, 5.0)


async def test_a_stream_that_waits_for_other_weights_goes_on_with_the_old_ones_where_none_came() -> None:
    world = World("keep")
    Telling(world, [(0, 2)])
    reader = Reader(world, REQUEST)
    await until(lambda: len(reader.tokens) == 1)
    await paused(world)
    world.state.resume()  # the sync was given up before anything was touched
    await reader.task
    assert reader.of(0) == [2, 7, 1]
    assert recorded(reader) == [(0, *OLD)]


@pytest.mark.parametrize(("pin", "status"), [(OLD, 409), (None, 503)])
async def test_a_stream_that_cannot_go_on_ends_with_the_reason(pin: Version | None, status: int) -> None:
    world = World("keep")
    Telling(world, [(0, 2)])
    reader = Reader(world, REQUEST, pin)
    await until(lambda: len(reader.tokens) == 1)
    await paused(world)
    world.new_weights()
    if pin:
        world.state.commit(NEW, 2)  # but it is pinned to the old
    else:
        world.state.resume()  # weights were touched and not committed
    with pytest.raises(ApiError) as refused:
        await reader.task
    assert refused.value.status == status


async def test_a_stream_that_vllm_does_not_end_is_an_error_and_not_asked_for_again() -> None:
    world = World("keep")

    async def events(path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        event = answer([2])
        event["choices"][0] |= {"finish_reason": None, "weight_versions": None}
        yield event

    world.vllm.events = events  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="did not finish"):
        await Reader(world, REQUEST).task


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_logprobs_before_truncation_are_of_the_weights_that_sampled(mode: str) -> None:
    world = World(mode)
    asking = asyncio.create_task(world.flow.generate([replace(REQUEST, top_p=0.5)], None))
    sampled = await world.asked()
    world.state.pause(60.0)
    sampled.set_result(answer([2, 1], runs=(("1.1", 0, 2),)))
    await until(lambda: world.flow.load == 1)  # the second pass waits
    world.new_weights()
    world.state.commit(NEW, 2)
    (await world.asked(2)).set_result(scored("1.2", -9.0))
    # its numbers are of other weights than the tokens: begun anew
    (await world.asked(3)).set_result(answer([2, 1], runs=(("1.2", 0, 2),)))
    (await world.asked(4)).set_result(scored("1.2", -0.25))
    [(completions, version)] = await asking
    assert (completions[0].logprobs, completions[0].versions, version) == ([-0.25, -0.25], ((0, *NEW),), NEW)


async def test_streamed_all_at_once_tokens_still_say_which_weights_they_are_of() -> None:
    world = World("keep")
    reader = Reader(world, replace(REQUEST, n=2, temperature=0.0))
    running = await world.asked()
    world.state.pause(60.0)
    await world.flow.idle()
    world.new_weights()
    running.set_result(answer([2, 3, 1], runs=(("1.1", 0, 1), ("1.2", 1, 3))))
    await until(lambda: world.flow.load == 0)
    world.state.commit(NEW, 2)
    await reader.task
    assert reader.began == OLD
    assert recorded(reader) == [(0, *OLD), (1, *NEW)]


async def test_a_pinned_answer_that_other_weights_went_on_with_is_refused() -> None:
    world = World("keep")
    asking = asyncio.create_task(world.flow.generate([REQUEST], OLD))
    running = await world.asked()
    await paused(world)
    world.new_weights()
    running.set_result(answer([2, 3, 1], runs=(("1.1", 0, 1), ("1.2", 1, 3))))
    await until(lambda: world.flow.load == 0)
    world.state.commit(NEW, 2)
    with pytest.raises(ApiError) as refused:
        await asking
    assert (refused.value.status, refused.value.code) == (409, "version_mismatch")


def scored(version: str, logprob: float) -> dict[str, Any]:
    """The second pass over prompt 4 4 and response 2 1."""
    rows = [{str(token): {"logprob": logprob}} for token in (4, 2, 1)]
    return {**answer([5], runs=((version, 0, 1),)), "prompt_logprobs": [None, *rows]}


def recorded(reader: Reader) -> list[tuple[int, int, int]] | None:
    """The versions that a client's history has of the first choice: through the chunks, as they are sent."""
    codec: Any = Letters()
    assert reader.began is not None
    chunks = Chunks(
        CompletionBody(prompt=[4, 4], return_token_ids=True), reader.request, codec, model="m", prompt_text="ee"
    )
    gathered = AnswerAssembler()
    for chunk in (*chunks.opening(reader.began), *chunks.of(reader.tokens)):
        gathered.add(chunk)
    first = experiences_of(gathered.answer(), 1.0)[0]
    assert first.tokens.tolist() == [4, 4, *reader.of(0)]
    return first.versions
