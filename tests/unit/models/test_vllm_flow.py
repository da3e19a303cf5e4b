"""What happens to requests around a pause, on a vLLM that answers when the test says so."""

import asyncio
import base64
import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.waiting import until
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import GenerationRequest, RoutedExperts, ScoreRequest, Token
from trinity_mq.engines.server.openai.requests import CompletionBody
from trinity_mq.engines.server.openai.streaming import Chunks
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import BUSY, REFUSED
from trinity_mq.engines.vllm.flow import VllmBatcher
from trinity_mq.engines.vllm.generator import VllmGenerator
from trinity_mq.families.family import ParsedAnswer
from trinity_mq.messages import Version
from trinity_mq.models.recording.responses import experiences_of
from trinity_mq.models.recording.sse import AnswerAssembler


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


class Commands:
    """Stands for the client: remembers the commands in their order."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def post(self, path: str, body: Any = None, timeout: float | None = None, **query: str) -> dict[str, Any]:
        self.sent.append(path)
        return {}

    async def command(self, path: str, body: Any, timeout: float) -> None:
        self.sent.append(path)


@pytest.mark.parametrize(("level", "sleeps"), [(1, True), (2, True), (1, False)])
async def test_vllm_sleeps_and_takes_weights_before_it_has_a_cache_and_runs_requests(
    tmp_path: Path, level: Any, sleeps: bool
) -> None:
    client = Commands()
    generator = VllmGenerator(
        cast("Any", Letters()),
        cast("Any", client),
        vocabulary=9,
        max_model_len=8,
        pause_mode="abort",
        give_up=lambda: None,
        home=tmp_path,
        sleeps=sleeps,
    )
    await generator.sleep(level)
    await generator.wake_weights()
    await generator.apply({"version": [1, 2], "epoch": 1, "attempt": 1})
    await generator.wake_cache()
    await generator.wake_cache()
    asleep = [f"/sleep?level={level}", "/wake_up?tags=weights"] if sleeps else []
    awake = ["/wake_up?tags=kv_cache"] if sleeps else []
    assert client.sent == [api.PAUSE, *asleep, api.PAUSE, api.FINISH_UPDATE, *awake, api.RESUME]
    client.sent.clear()
    await generator.apply({"version": [1, 3], "epoch": 1, "attempt": 2})
    assert client.sent == [api.PAUSE, api.FINISH_UPDATE, api.RESUME]


@pytest.mark.parametrize("option", [{"logit_bias": {1: 2.0}}, {"min_tokens": 2}, {"top_logprobs": 2}])
async def test_options_whose_logprobs_vllm_cannot_report_are_refused_with_top_p(option: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=rf"{next(iter(option))} and top_p=0.5 cannot be combined") as refused:
        await World("wait").flow.generate([replace(REQUEST, top_p=0.5, **option)], None)
    assert refused.value.status == 400


class Letters:
    def decode(self, sequences: Any) -> list[str]:
        return ["".join(chr(97 + token) for token in tokens) for tokens in sequences]

    def read_answer(self, text: str, prompt_end: str | None, tools: Any) -> ParsedAnswer:
        return ParsedAnswer(text)


REQUEST = GenerationRequest([4, 4], 8, stop_ids=frozenset({1}))


class World:
    """A flow that serves version 1.1."""

    def __init__(self, mode: Any, vllm: ScriptedVllm | None = None) -> None:
        self.vllm, self.state = vllm or ScriptedVllm(), EngineState()
        self.state.phase, self.state.version = "current", (1, 1)
        codec: Any = Letters()
        client: Any = self.vllm
        self.flow = VllmBatcher(client, self.state, codec, max_sequences=8, pause_mode=mode, hold=5.0)

    async def asked(self, number: int = 1) -> asyncio.Future[dict[str, Any]]:
        await until(lambda: len(self.vllm.asked) == number)
        return self.vllm.asked[-1]

    def new_weights(self) -> None:
        self.state.touch()
        self.state.applied = True

    def commit_new_weights(self) -> None:
        self.new_weights()
        self.state.commit((1, 2), 2)


@pytest.fixture
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


FORCED = replace(REQUEST, grammar="{}", marks_constrained=True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_that_a_grammar_decided_are_marked_and_the_others_keep_their_logprobs(
    group: asyncio.TaskGroup, streamed: bool
) -> None:
    """A stream waits for the whole answer: a grammar cannot be resumed, and the marks come with the scores."""
    world = World("keep")
    with_marks: asyncio.Task[list[bool]] = group.create_task(marks_of(world, streamed=streamed))
    (await world.asked()).set_result(answer([2, 3, 1], runs=(("1.1", 0, 3),)))
    (await world.asked(2)).set_result(scores_of({4: -9.0, 2: -0.5, 3: -3.0, 1: -0.5}))
    assert await with_marks == [False, True, False]
    assert [body["sampling_params"].get("structured_outputs") for _, body in world.vllm.sent] == [
        {"structural_tag": "{}"},
        None,
    ]


async def marks_of(world: World, *, streamed: bool) -> list[bool]:
    if not streamed:
        [([completion], _)] = await world.flow.generate([FORCED], None)
        assert completion.logprobs == [-0.5, -0.5, -0.5]
        return [place in completion.constrained for place in range(3)]
    async with world.flow.stream(FORCED, None) as stream:
        assert await stream.begun() == (1, 1)
        tokens = [token async for news in stream for token in news]
    assert [token.logprob for token in tokens] == [-0.5, -0.5, -0.5]
    return [token.is_constrained for token in tokens]


async def test_a_schema_that_vllm_refuses_is_the_clients_fault(group: asyncio.TaskGroup) -> None:
    world = World("wait")
    for grammar, status in (("{}", 400), ("", 500)):
        asked = group.create_task(refusal(world.flow, request=replace(REQUEST, grammar=grammar)))
        (await world.asked(1 if grammar else 2)).set_exception(ApiError(500, "vLLM answered 400: x", code=REFUSED))
        assert (await asked).status == status


def scores_of(logprobs: dict[int, float]) -> dict[str, Any]:
    """The second pass over prompt 4 and these tokens."""
    rows = [{str(token): {"logprob": logprob}} for token, logprob in logprobs.items()]
    return {**answer([5], runs=(("1.1", 0, 1),)), "prompt_logprobs": [None, *rows]}


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
    world.commit_new_weights()
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
    world.commit_new_weights()
    (await world.asked(2)).set_result(answer([3, 1], runs=(("1.2", 0, 2),)))
    [(completions, version)] = await asked
    assert (completions[0].token_ids, version) == ([3, 1], (1, 2))


async def test_a_request_that_vllm_refuses_during_the_abort_begins_anew_too(group: asyncio.TaskGroup) -> None:
    """From version 0.33 on: the request was sent, and reaches vLLM when that is paused."""
    world = World("abort")
    late, asked = (group.create_task(world.flow.generate([REQUEST], None)) for _ in range(2))
    await world.asked(2)
    refused = world.vllm.asked[0]
    world.state.pause(60.0)
    idle = group.create_task(world.flow.idle())
    await until(world.vllm.asked[1].done)
    refused.set_exception(ApiError(503, "paused", code=BUSY))
    await idle
    world.commit_new_weights()
    await world.asked(4)
    for answered in world.vllm.asked[2:]:
        answered.set_result(answer([3, 1], runs=(("1.2", 0, 2),)))
    assert [(await task)[0][1] for task in (late, asked)] == [(1, 2), (1, 2)]


async def test_a_refusal_without_a_pause_is_the_caller_s(group: asyncio.TaskGroup) -> None:
    world = World("abort")
    asked = group.create_task(refusal(world.flow))
    (await world.asked()).set_exception(ApiError(503, "the queue is full", code=BUSY, retry_after=1.0))
    assert ((await asked).status, (await asked).retry_after) == (503, 1.0)
    assert len(world.vllm.asked) == 1


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


class Scoring(ScriptedVllm):
    """Gives each token the logprob -0.25 times its number; answers when as many requests wait as are sent at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[tuple[int, ...]] = []
        self.salts_seen: set[str] = set()
        self.here = self.most = 0
        self.version = "1.1"

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        assert body is not None
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["max_tokens"]) == (0.5, 1)
        self.prompts.append(tuple(body["token_ids"]))
        self.salts_seen.add(body["cache_salt"])
        self.here += 1
        self.most = max(self.most, self.here)
        await asyncio.sleep(0)
        self.here -= 1
        [token] = set(sampling["logprob_token_ids"])
        said = answer([5], runs=((self.version, 0, 1),))
        top = [{"token_id": 5, "logprob": -9.0}, {"token_id": token, "logprob": -0.25 * token}]
        said["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = top
        return said


async def test_at_another_temperature_each_token_is_scored_after_the_ones_before_it() -> None:
    vllm = Scoring()
    world = World("wait", vllm)
    tokens = [(7 * place + 3) % 16 for place in range(40)]
    [(scores, version)] = await world.flow.score([ScoreRequest(tokens, 0.5)], None)
    assert (scores, version) == ([-0.25 * token for token in tokens[1:]], (1, 1))
    assert vllm.prompts[0] == tuple(tokens[:-1]), "the longest first: the others find it in the cache"
    assert sorted(vllm.prompts) == [tuple(tokens[:end]) for end in range(1, 40)]
    assert vllm.most == 8, "no more at a time than sequences in a batch"
    assert vllm.salts_seen == {"1.1"}


async def test_scores_of_other_weights_are_asked_again() -> None:
    vllm = Scoring()
    world = World("keep", vllm)
    vllm.version = "1.2"  # while the engine serves 1.1
    scoring = asyncio.create_task(world.flow.score([ScoreRequest([2, 3, 4], 0.5)], None))
    await until(lambda: len(vllm.prompts) > 3)
    assert not scoring.done()
    vllm.version = "1.1"
    assert await scoring == [([-0.75, -1.0], (1, 1))]


async def test_without_weights_and_after_closing_nothing_is_sent() -> None:
    world = World("wait")
    world.state.phase = "empty"
    assert (await refusal(world.flow)).code == "engine_not_current"
    world.state.phase = "current"
    await world.flow.close(1.0)
    assert (await refusal(world.flow)).code == "engine_stopping"
    assert world.vllm.sent == []


async def refusal(flow: VllmBatcher, count: int = 1, request: GenerationRequest = REQUEST) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await flow.generate([request] * count, None)
    return refused.value


async def test_a_stream_whose_weights_changed_ends_with_an_error() -> None:
    world = World("keep")

    async def events(path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        yield answer([2, 1], runs=(("1.1", 0, 1), ("1.2", 1, 2)))

    world.vllm.events = events  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="weights changed"):
        await Reader(world, REQUEST).task


async def test_a_stream_that_cannot_begin_says_so_as_other_requests_do() -> None:
    world = World("wait")
    world.state.pause(60.0)
    reading = Reader(world, REQUEST).task
    await until(lambda: world.flow.load == 1)
    world.state.touch()
    world.state.resume()
    with pytest.raises(ApiError) as refused:
        await reading
    assert refused.value.status == 503


# -- streams across new weights

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
    world.commit_new_weights()
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
    assert recorded(reader) == [(0, *OLD), (2, *NEW)]


async def test_a_choice_that_has_ended_is_not_asked_for_again() -> None:
    world = World("keep")
    vllm = Telling(world, [(0, 2), (1, 3)])
    reader = Reader(world, replace(REQUEST, n=2, stop=("d",)))  # token 3 is d
    await until(lambda: len(reader.tokens) == 2)
    await paused(world)
    world.commit_new_weights()
    await reader.task
    assert [body["token_ids"] for body in vllm.asked] == [[4, 4], [4, 4, 2]]
    assert (reader.of(0), reader.of(1)) == ([2, 7, 1], [3])


async def test_a_stream_of_which_nothing_has_come_is_wholly_of_the_new_weights() -> None:
    world = World("keep")
    vllm = Telling(world, [])
    reader = Reader(world, replace(REQUEST, seed=3))
    await until(lambda: len(vllm.asked) == 1 and reader.began is not None)
    await paused(world)
    world.commit_new_weights()
    await reader.task
    assert [body["sampling_params"]["seed"] for body in vllm.asked] == [3, 3]
    assert [(token.token_id, token.version) for token in reader.tokens] == [(7, NEW), (1, None)]
    assert recorded(reader) == [(0, *NEW)]


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
    world.commit_new_weights()
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


# -- routed experts


def routed(experts: Any) -> str:
    """Return experts as vLLM sends them: a file of numpy in base64."""
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


async def test_completions_carry_the_experts_of_routed_layers() -> None:
    vllm: Any = ScriptedVllm()
    codec: Any = Letters()
    state = EngineState()
    state.serve_fixed_weights()
    flow = VllmBatcher(vllm, state, codec, max_sequences=4, routed_layers=[1, 3])
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(flow.generate([REQUEST], None))
        await until(lambda: bool(vllm.asked))
        experts = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)  # vLLM may add the last token
        sampled = answer([5, 6, 1])
        sampled["choices"][0]["routed_experts"] = routed(experts)
        vllm.asked[-1].set_result(sampled)
    [([completion], _)] = asking.result()
    expected = RoutedExperts((4, 2, 2), experts[:4, [1, 3]].tobytes())
    assert completion.routed_experts == expected


def test_experts_of_fewer_tokens_are_left_out_and_unreadable_ones_refused() -> None:
    assert api.read_routed_experts(routed(np.zeros((3, 2, 2), np.uint8)), 4, [0, 1]) is None
    for experts in (np.zeros((4, 1, 2), np.uint8), np.zeros((4, 2)), np.zeros((4, 2, 2)), np.full((4, 2, 2), 300)):
        with pytest.raises(ApiError, match="routed experts that cannot be read"):
            api.read_routed_experts(routed(experts), 4, [0, 1])
    pickled = io.BytesIO()
    np.save(pickled, np.array([object()]), allow_pickle=True)
    for text in ("", "no base64!", "AAAA", base64.b64encode(pickled.getvalue()).decode()):
        with pytest.raises(ApiError, match="routed experts that cannot be read"):
            api.read_routed_experts(text, 4, [0, 1])
