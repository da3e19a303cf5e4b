"""What happens to requests around a pause, on a vLLM that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import pytest

from tests.waiting import until
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import GenerationRequest, ScoreRequest
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.flow import VllmBatcher


def answer(tokens: list[int], *, ended: str = "stop", runs: tuple[tuple[str, int, int], ...] = ()) -> dict[str, Any]:
    spans = [{"version": version, "start": start, "end": end} for version, start, end in runs]
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {"index": 0, "finish_reason": ended, "token_ids": tokens, "weight_versions": spans}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}


class ScriptedVllm:
    """Stands for the client: remembers what it is sent, answers when told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.asked: list[asyncio.Future[dict[str, Any]]] = []
        self.closed_streams = 0

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        self.sent.append((path, body or query))
        if path == api.GENERATE:
            self.asked.append(asyncio.get_running_loop().create_future())
            return await self.asked[-1]
        if path == api.PAUSE and query["mode"] == "abort":
            self.asked[-1].set_result(answer([5], ended="abort", runs=(("1.1", 0, 1),)))
        return {}

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.sent.append((path, body))
        try:
            for token in (2, 3):
                event = answer([token])
                event["choices"][0] |= {"finish_reason": None, "weight_versions": None}
                yield event
            await asyncio.Event().wait()
        finally:
            self.closed_streams += 1

    def salts(self) -> list[str]:
        return [body["cache_salt"] for path, body in self.sent if path == api.GENERATE]


class Letters:
    def decode(self, sequences: Any) -> list[str]:
        return ["".join(chr(97 + token) for token in tokens) for tokens in sequences]


REQUEST = GenerationRequest([4, 4], 8, stop_ids=frozenset({1}))


class World:
    """A flow that serves version 1.1."""

    def __init__(self, mode: Any) -> None:
        self.vllm, self.state = ScriptedVllm(), EngineState()
        self.state.phase, self.state.version = "current", (1, 1)
        codec: Any = Letters()
        client: Any = self.vllm
        self.flow = VllmBatcher(client, self.state, codec, vocabulary=9, max_sequences=8, pause_mode=mode, hold=5.0)

    async def asked(self, number: int = 1) -> asyncio.Future[dict[str, Any]]:
        await until(lambda: len(self.vllm.asked) == number)
        return self.vllm.asked[-1]

    def new_weights(self) -> None:
        self.state.touch()
        self.state.applied = True


@pytest.fixture
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


async def test_wait_is_idle_once_what_runs_has_ended_and_sends_nothing_more(group: asyncio.TaskGroup) -> None:
    world = World("wait")
    first = group.create_task(world.flow.generate([REQUEST], None))
    running = await world.asked()
    world.state.pause(60.0)
    idle = group.create_task(world.flow.idle())
    second = group.create_task(world.flow.generate([REQUEST], None))
    await until(lambda: world.flow.load == 2)
    assert not idle.done()
    running.set_result(answer([2, 1], runs=(("1.1", 0, 2),)))
    [(completions, version)] = await first
    assert (completions[0].token_ids, completions[0].text, version) == ([2, 1], "c", (1, 1))
    await idle
    assert len(world.vllm.asked) == 1
    world.new_weights()
    world.state.commit((1, 2), 2)
    (await world.asked(2)).set_result(answer([3, 1], runs=(("1.2", 0, 2),)))
    assert (await second)[0][1] == (1, 2)
    assert world.vllm.salts() == ["1.1", "1.2"]
    assert world.flow.load == 0


async def test_abort_begins_anew_with_the_new_weights(group: asyncio.TaskGroup) -> None:
    world = World("abort")
    asked = group.create_task(world.flow.generate([REQUEST], None))
    await world.asked()
    world.state.pause(60.0)
    await world.flow.idle()
    assert not asked.done()
    world.new_weights()
    world.state.commit((1, 2), 2)
    (await world.asked(2)).set_result(answer([3, 1], runs=(("1.2", 0, 2),)))
    [(completions, version)] = await asked
    assert (completions[0].token_ids, version) == ([3, 1], (1, 2))


async def test_keep_hands_out_tokens_of_new_weights_only_once_those_are_committed(group: asyncio.TaskGroup) -> None:
    world = World("keep")
    asked = group.create_task(world.flow.generate([REQUEST], None))
    running = await world.asked()
    world.state.pause(60.0)
    await world.flow.idle()  # at once: what runs is kept
    world.new_weights()
    running.set_result(answer([2, 3, 1], runs=(("1.1", 0, 1), ("1.2", 1, 3))))
    await until(lambda: world.flow.load == 0)
    assert not asked.done()
    world.state.commit((1, 2), 2)
    [(completions, version)] = await asked
    assert completions[0].versions == ((0, 1, 1), (1, 1, 2))
    assert version == (1, 1)  # the oldest


async def test_tokens_of_weights_that_were_never_committed_are_not_handed_out(group: asyncio.TaskGroup) -> None:
    world = World("keep")
    asked = group.create_task(refusal(world.flow))
    running = await world.asked()
    world.state.pause(60.0)
    world.new_weights()
    running.set_result(answer([2, 1], runs=(("1.2", 0, 2),)))
    await until(lambda: world.flow.load == 0)
    world.state.resume()  # the try was given up
    error = await asked
    assert (error.status, error.code) == (503, "engine_not_current")
    assert error.retry_after is not None


async def test_an_engine_without_weights_sends_nothing(group: asyncio.TaskGroup) -> None:
    world = World("wait")
    world.state.phase, world.state.version = "empty", None
    assert (await refusal(world.flow)).status == 503
    assert world.vllm.sent == []


async def test_one_of_several_requests_that_fails_ends_the_others(group: asyncio.TaskGroup) -> None:
    world = World("wait")
    both = group.create_task(refusal(world.flow, 2))
    await world.asked(2)
    world.vllm.asked[0].set_exception(ApiError(500, "no", code="generation_failed"))
    assert (await both).code == "generation_failed"
    assert world.vllm.asked[1].cancelled()
    assert world.flow.load == 0


async def test_a_stream_that_is_left_ends_the_request() -> None:
    world = World("wait")
    async with world.flow.stream(REQUEST, None) as stream:
        assert await stream.begun() == (1, 1)
        tokens = []
        async for news in stream:
            tokens += [token.token_id for token in news]
            if len(tokens) == 2:
                break
    assert tokens == [2, 3]
    assert world.vllm.closed_streams == 1
    assert world.flow.load == 0


async def test_a_stop_string_ends_the_request_where_it_is_complete() -> None:
    world = World("wait")
    request = GenerationRequest([4], 8, stop=("cd",))
    [([completion], _)] = await world.flow.generate([request], None)
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([2, 3], "", "stop")
    assert world.vllm.closed_streams == 1


async def test_at_temperature_0_several_choices_are_one_asked_for_once(group: asyncio.TaskGroup) -> None:
    world = World("wait")
    asked = group.create_task(world.flow.generate([GenerationRequest([4], 8, n=3, temperature=0.0)], None))
    (await world.asked()).set_result(answer([2, 1], runs=(("1.1", 0, 2),)))
    [(completions, _)] = await asked
    assert [completion.token_ids for completion in completions] == [[2, 1]] * 3
    assert world.vllm.sent[0][1]["sampling_params"]["n"] == 1


async def test_scoring_a_large_vocabulary_at_another_temperature_is_refused_with_the_reason() -> None:
    world = World("wait")
    tokens = ScoreRequest([1] * (api.SCORED_AT_ONCE // 9 + 1), 0.5)
    with pytest.raises(ApiError, match="Use temperature 1"):
        await world.flow.score([tokens], None)


async def test_after_closing_nothing_is_sent() -> None:
    world = World("wait")
    await world.flow.close(1.0)
    assert (await refusal(world.flow)).code == "engine_stopping"
    assert world.vllm.sent == []


async def refusal(flow: VllmBatcher, count: int = 1) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await flow.generate([REQUEST] * count, None)
    return refused.value


async def test_a_stream_whose_weights_changed_ends_with_an_error() -> None:
    world = World("keep")

    async def events(path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        yield answer([2, 1], runs=(("1.1", 0, 1), ("1.2", 1, 2)))

    world.vllm.events = events  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="weights changed"):
        await streamed(world.flow)


async def test_a_stream_that_cannot_begin_says_so_as_other_requests_do() -> None:
    world = World("wait")
    world.state.pause(60.0)
    reading = asyncio.create_task(streamed(world.flow))
    await until(lambda: world.flow.load == 1)
    world.state.touch()
    world.state.resume()
    with pytest.raises(ApiError) as refused:
        await reading
    assert refused.value.status == 503


async def streamed(flow: VllmBatcher) -> list[int]:
    async with flow.stream(REQUEST, None) as stream:
        await stream.begun()
        return [token.token_id async for news in stream for token in news]
