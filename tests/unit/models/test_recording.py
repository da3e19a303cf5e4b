"""What history records is what the engine sampled: token for token and logprob for logprob, however it was asked."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai
import pytest
import torch

from tests.unit.models import talker as taught
from trinity_mq.engines.generation.request import Completion, GenerationListener, GenerationRequest, Token
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.models import EngineLost, EngineRefused, InferenceModel, ModelWrapper, VersionMismatch
from trinity_mq.models.clients import EngineClients

MESSAGES: Any = [{"role": "user", "content": "+372="}]
DEADLINE = 20.0
Wrap = Callable[..., ModelWrapper]


class Overheard:
    """A generator that keeps what it sampled."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self.codec, self.max_model_len = generator.codec, generator.max_model_len
        self.vocabulary, self.score, self.cancel = generator.vocabulary, generator.score, generator.cancel
        self.sampled: list[Completion] = []
        self.prompts: list[list[int]] = []
        self.hold: Hold | None = None

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        assert listener is not None
        if self.hold is not None:
            self.hold.inner = listener
        answers = self._generator.generate(requests, self.hold or listener)
        self.prompts += [list(request.prompt) for request in requests for _ in range(request.n)]
        self.sampled += [completion for completions in answers for completion in completions]
        return answers


class Hold:
    """A watch that lets ``steps`` decode steps go by, then waits until the first request's asker has left."""

    def __init__(self, steps: int) -> None:
        self.inner: GenerationListener
        self.steps = steps
        self.reached = threading.Event()

    def listens(self, request: int) -> bool:
        return self.inner.listens(request)

    def sampled(self, tokens: list[Token]) -> None:
        self.inner.sampled(tokens)

    def between(self, step: int) -> None:
        pass

    def left(self, request: int) -> bool:
        self.steps -= 1
        if self.steps == 0:
            self.reached.set()
            until = time.monotonic() + DEADLINE
            while not self.inner.left(request):
                assert time.monotonic() < until, "nobody left"
                time.sleep(0.005)
        return self.inner.left(request)


class UntilRead(Hold):
    """A watch that lets ``steps`` decode steps go by, then waits until the asker has read what they sampled."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.read = threading.Event()

    def left(self, request: int) -> bool:
        self.steps -= 1
        if self.steps == 0:
            assert self.read.wait(DEADLINE), "nothing was read"
        return self.inner.left(request)


@pytest.fixture
def engine(shared_generator: TextGenerator) -> Overheard:
    return Overheard(shared_generator)


@pytest.fixture
async def server(serving: Any, engine: Overheard) -> AsyncIterator[EngineServer]:
    async with serving(engine) as server:
        yield server


@pytest.fixture
def wrap(server: EngineServer, handle_of: Any, clients: EngineClients) -> Wrap:
    usual = {"clients": clients, "max_response_tokens": 12, "enable_history": True, "seed": 5, "temperature": 0.7}
    return lambda **options: ModelWrapper(handle_of(server), **{**usual, **options})


def assert_equal_to_what_was_sampled(recorded: list[Experience], engine: Overheard) -> None:
    assert len(recorded) == len(engine.sampled) > 0
    for experience, prompt, completion in zip(recorded, engine.prompts, engine.sampled, strict=True):
        assert experience.prompt_length == len(prompt)
        assert experience.tokens.tolist() == prompt + completion.token_ids
        assert experience.logprobs is not None
        assert torch.equal(experience.logprobs, torch.tensor(completion.logprobs, dtype=torch.float32))
        assert experience.response_text == completion.text
        assert experience.truncate_status == (None if completion.finish_reason == "stop" else "response_truncated")
        assert experience.versions == [(0, 1, 7)]
        assert experience.temperature == 0.7


async def ask(model: ModelWrapper, *, sync: bool, **options: Any) -> list[Any]:
    """Ask with an OpenAI client; return the completion, or the chunks of the stream, in a list."""
    options = {"model": "tiny", "messages": MESSAGES, **options}
    answer: Any
    if sync:

        def work() -> list[Any]:
            with model.get_openai_client() as client:
                answer: Any = client.chat.completions.create(**options)
                return list(answer) if options.get("stream") else [answer]

        return await asyncio.to_thread(work)
    async with model.get_openai_async_client() as client:
        answer = await client.chat.completions.create(**options)
        return [chunk async for chunk in answer] if options.get("stream") else [answer]


async def pending(server: EngineServer, count: int) -> None:
    """Return when so many sequences wait for a batch step."""
    async with asyncio.timeout(DEADLINE):
        while server.batcher.load < count:  # noqa: ASYNC110  # a queue that tells nobody
            await asyncio.sleep(0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_chat_is_recorded_as_sampled(wrap: Wrap, engine: Overheard, sync: bool, stream: bool, n: int) -> None:
    model = wrap()
    answer = await ask(model, sync=sync, n=n, **({"stream": True} if stream else {}))
    assert_equal_to_what_was_sampled(model.extract_experience_from_history(), engine)
    assert model.extract_experience_from_history() == []
    assert model.model_version == (1, 7)
    texts = [""] * n
    for part in answer:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert texts == [completion.text for completion in engine.sampled]


async def test_a_stream_is_read_while_the_model_samples(wrap: Wrap, engine: Overheard) -> None:
    engine.hold = hold = UntilRead(steps=3)
    async with wrap().get_openai_async_client() as client, asyncio.timeout(DEADLINE):
        chunks = aiter(await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        first = await anext(chunks)
        while not first.choices[0].delta.content:
            first = await anext(chunks)
        assert engine.sampled == [], "the model has not ended its answer"
        hold.read.set()
        texts = [first.choices[0].delta.content, *[chunk.choices[0].delta.content or "" async for chunk in chunks]]
    assert "".join(texts) == engine.sampled[0].text


async def test_a_stream_samples_what_a_whole_answer_does(wrap: Wrap, engine: Overheard) -> None:
    await ask(wrap(), sync=False, n=2)
    await ask(wrap(), sync=False, n=2, stream=True)
    assert engine.sampled[:2] == engine.sampled[2:]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions_are_recorded_as_sampled(wrap: Wrap, engine: Overheard, stream: bool) -> None:
    model = wrap()
    async with model.get_openai_async_client() as client:
        answer: Any = await client.completions.create(model="tiny", prompt="+1=", n=2, stream=stream, logprobs=0)
        parts = [chunk async for chunk in answer] if stream else [answer]
        second = [choice.logprobs for part in parts for choice in part.choices if choice.index == 1]
        told = [value for logprobs in second if logprobs for value in logprobs.token_logprobs]
        assert told == engine.sampled[1].logprobs
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="+1=", temperature="hot")  # type: ignore[call-overload]
    assert_equal_to_what_was_sampled(model.extract_experience_from_history(), engine)


async def test_whatever_is_built_on_a_client_is_recorded(wrap: Wrap, engine: Overheard) -> None:
    model = wrap()
    async with model.get_openai_async_client() as client:
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
        assert raw.parse().choices[0].message.content == engine.sampled[0].text
        await client.with_options(timeout=20.0, max_retries=1).chat.completions.create(model="tiny", messages=MESSAGES)
        assert (await client.chat.completions.create(messages=MESSAGES)).model == "tiny", "there is but one model"
        stop = list("0123456789+-=,")  # the helper refuses answers that a limit ended
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES, stop=stop) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == engine.sampled[3].text
        async with client.chat.completions.with_streaming_response.create(model="tiny", messages=MESSAGES) as response:
            assert json.loads(await response.read())["choices"]
        assert [entry.id async for entry in client.models.list()] == ["tiny"]
    recorded = model.extract_experience_from_history()
    assert len(recorded) == 5
    assert_equal_to_what_was_sampled(recorded, engine)


async def test_usage_and_logprobs_come_where_they_are_asked_for(wrap: Wrap, engine: Overheard) -> None:
    model = wrap()
    chunks = await ask(model, sync=False, stream=True, n=2, logprobs=True, stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    sampled = sum(len(completion.token_ids) for completion in engine.sampled)
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, sampled)
    for index, completion in enumerate(engine.sampled):
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        told = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert told == completion.logprobs
        assert [piece.finish_reason for piece in pieces][-1] == completion.finish_reason
    [plain] = await ask(model, sync=False)
    assert plain.choices[0].logprobs is None, "texts of tokens are not sent for the recording alone"
    [plain] = await ask(model, sync=False, logprobs=True)
    assert len(plain.choices[0].logprobs.content) == len(plain.choices[0].token_ids)
    [short] = await ask(model, sync=False, max_completion_tokens=2)
    assert len(short.choices[0].token_ids) <= 2
    assert_equal_to_what_was_sampled(model.extract_experience_from_history(), engine)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("how", ["closed", "taken"])
async def test_a_stream_left_early_ends_the_sampling_and_is_recorded_as_far_as_it_came(
    wrap: Wrap, engine: Overheard, server: EngineServer, sync: bool, how: str
) -> None:
    engine.hold = Hold(steps=4)
    model = wrap(max_response_tokens=50)
    options: Any = {"model": "tiny", "messages": MESSAGES, "stream": True, "n": 3}
    taken: list[Experience] = []
    if sync:

        def work() -> None:
            with model.get_openai_client() as client:
                with client.chat.completions.create(**options) as stream:
                    for chunk in stream:
                        if any(choice.token_ids for choice in chunk.choices):
                            break
                    if how == "taken":
                        taken.extend(model.extract_experience_from_history())

        await asyncio.to_thread(work)
    else:
        async with model.get_openai_async_client() as client:
            async with await client.chat.completions.create(**options) as stream:
                async for chunk in stream:
                    if any(choice.token_ids for choice in chunk.choices):
                        break
                if how == "taken":
                    taken.extend(model.extract_experience_from_history())
    async with asyncio.timeout(DEADLINE):
        await server.batcher.idle()
    recorded = taken + model.extract_experience_from_history()
    assert 1 <= len(recorded) <= 3
    assert all(1 <= experience.response_length <= 4 for experience in recorded)
    assert all(e.truncate_status == "response_truncated" or e.tokens[-1] == 1 for e in recorded)
    assert server.batcher.counters.tokens < 3 * 5, "rows that nobody waits for were let go"
    engine.hold = None
    [whole] = await wrap(max_response_tokens=50, enable_history=True).chat_async(MESSAGES, n=1)
    first = recorded[0]
    assert whole.tokens[: len(first.tokens)].tolist() == first.tokens.tolist(), "the same seed, the same beginning"


async def test_a_client_that_hangs_up_frees_its_rows_only(wrap: Wrap, engine: Overheard, server: EngineServer) -> None:
    engine.hold = Hold(steps=3)
    leaving = asyncio.create_task(wrap(max_response_tokens=50).chat_async(MESSAGES, n=40))
    await pending(server, 40)
    staying = asyncio.create_task(wrap(max_response_tokens=50, seed=6).chat_async(MESSAGES, n=2))
    assert await asyncio.to_thread(engine.hold.reached.wait, DEADLINE)
    leaving.cancel()
    answered = await staying
    assert len(engine.sampled) == 42, "one batch step"
    assert [e.tokens[5:].tolist() for e in answered] == [c.token_ids for c in engine.sampled[40:]]
    assert all(completion.finish_reason for completion in engine.sampled[40:])
    assert sum(len(completion.token_ids) for completion in engine.sampled[:40]) < 40 * 3


async def test_an_answer_that_comes_after_the_run_is_not_the_next_runs(wrap: Wrap, server: EngineServer) -> None:
    model = wrap()
    server.state.pause(60.0)
    async with model.get_openai_async_client() as client:
        asked: Any = client.chat.completions.create(model="tiny", messages=MESSAGES)
        late = [asyncio.create_task(asked), asyncio.create_task(model.chat_async(MESSAGES))]
        await pending(server, 2)
        model.adopt_settings(wrap(seed=9))
        server.state.resume()
        await asyncio.gather(*late)
    assert model.extract_experience_from_history() == []


async def test_without_history_nothing_is_asked_for_or_kept(wrap: Wrap) -> None:
    model = wrap(enable_history=False)
    [answer] = await ask(model, sync=False)
    assert not hasattr(answer.choices[0], "token_ids")
    with pytest.raises(ValueError, match="enable_history=true"):
        model.extract_experience_from_history()
    assert model.model_version == (1, 7)
    assert await ask(model, sync=False, stream=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_too_long_is_told_and_recorded_masked(wrap: Wrap, stream: bool) -> None:
    model = wrap(max_prompt_tokens=3)
    assert await ask(model, sync=False, stream=stream), "conversations grow: only the model's length counts here"
    assert len(model.extract_experience_from_history()) == 1
    long = [{"role": "user", "content": "1" * 70}]
    with pytest.raises(openai.BadRequestError) as told:
        await ask(model, sync=False, n=2, stream=stream, messages=long)
    assert told.value.code == "context_length_exceeded"
    recorded = model.extract_experience_from_history()
    assert [e.prompt_length for e in recorded] == [63] * 2
    assert [e.truncate_status for e in recorded] == ["prompt_truncated"] * 2
    assert [e.reward for e in recorded] == [0.0, 0.0]


async def test_errors_of_streams_are_typed(wrap: Wrap, engine: Overheard, server: EngineServer) -> None:
    with pytest.raises(VersionMismatch):
        await ask(wrap(pinned=(1, 6)), sync=False, stream=True)
    with pytest.raises(ValueError, match="stream with get_openai_client"):
        await wrap().chat_async(MESSAGES, stream=True)
    model = wrap()
    engine.hold = Hold(steps=2)
    engine.hold.left = _break  # type: ignore[method-assign]
    with pytest.raises(EngineRefused, match="generation failed: RuntimeError: broken") as caught:
        await ask(model, sync=False, stream=True)
    assert caught.value.status == 500
    with pytest.raises(EngineRefused, match="broken"):
        await ask(model, sync=True, stream=True)
    assert model.extract_experience_from_history() == []
    gone = ModelWrapper(InferenceModel("e0", "http://127.0.0.1:9", "tiny"), enable_history=True)
    for sync in (False, True):
        with pytest.raises(EngineLost):
            await ask(gone, sync=sync, stream=True)
    await gone.aclose()


def _break(request: int) -> bool:
    raise RuntimeError("broken")


# -- tools


@pytest.fixture
async def tooled(
    serving: Any, talker: TextGenerator, handle_of: Any, clients: EngineClients
) -> AsyncIterator[tuple[ModelWrapper, Overheard]]:
    engine = Overheard(talker)
    async with serving(engine, max_response_tokens=120) as server:
        yield (
            ModelWrapper(handle_of(server), clients=clients, enable_history=True, seed=5, temperature=0.7),
            engine,
        )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_tool_calls_leave_the_text_and_recorded_as_sampled(
    tooled: tuple[ModelWrapper, Overheard], sync: bool, stream: bool, n: int
) -> None:
    model, engine = tooled
    options: Any = {"messages": [taught.QUESTION], "tools": [taught.ADD], "n": n, "stream": stream}
    answer = await ask(model, sync=sync, **options)
    assert [completion.text for completion in engine.sampled] == [taught.CALL] * n
    assert_equal_to_what_was_sampled(model.extract_experience_from_history(), engine)
    content, ended = [""] * n, [""] * n
    calls: list[list[Any]] = [[] for _ in range(n)]
    for part in answer:
        for choice in part.choices:
            said = choice.delta if stream else choice.message
            content[choice.index] += said.content or ""
            calls[choice.index] += said.tool_calls or []
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert content == [taught.SAID] * n
    assert ended == ["tool_calls"] * n
    for [call] in calls:
        assert call.id.startswith("call_")
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}


async def test_turns_with_a_tool_are_one_experience_where_the_tokens_say_so(
    tooled: tuple[ModelWrapper, Overheard], plain_logprobs: Any, talker: TextGenerator
) -> None:
    model, engine = tooled
    messages: list[Any] = [taught.QUESTION]
    async with model.get_openai_async_client() as client:
        first: Any = await client.chat.completions.create(model="tiny", messages=messages, tools=[taught.ADD])  # type: ignore[list-item]
        message = first.choices[0].message.model_dump(exclude_none=True)
        message["content"] += " "  # the blank before the call was the model's
        message["tool_calls"][0]["id"] = taught.CALL_ID
        result = {"role": "tool", "tool_call_id": taught.CALL_ID, "content": taught.RESULT}
        second: Any = await client.chat.completions.create(
            model="tiny", messages=[*messages, message, result], tools=[taught.ADD], n=2
        )
    assert [choice.message.content for choice in second.choices] == [taught.ANSWER] * 2
    apart = model.extract_experience_from_history(clear_history=False)
    assert_equal_to_what_was_sampled(apart, engine)
    merged, branch = model.extract_experience_from_history(merge_turns=True)
    assert branch.tokens.tolist() == apart[2].tokens.tolist(), "a second branch stays as it is"
    assert talker.codec.decode([merged.tokens])[0] == taught.WHOLE
    assert merged.prompt_length == apart[0].prompt_length
    assert merged.action_mask is not None
    assert merged.logprobs is not None
    trained = merged.tokens[merged.prompt_length :][merged.action_mask]
    assert trained.tolist() == engine.sampled[0].token_ids + engine.sampled[1].token_ids
    scores = merged.logprobs[merged.action_mask].tolist()
    assert scores == torch.tensor(engine.sampled[0].logprobs + engine.sampled[1].logprobs).tolist()
    prompt, response = merged.tokens[: merged.prompt_length].tolist(), merged.tokens[merged.prompt_length :].tolist()
    wanted = plain_logprobs(talker, prompt, response, 0.7)[merged.action_mask]
    assert torch.allclose(merged.logprobs[merged.action_mask], wanted, atol=1e-5, rtol=0)
    assert merged.versions == [(0, 1, 7)]
    assert merged.info["turns"] == 2
    assert Experience.deserialize_many(Experience.serialize_many([merged])) == [merged]


async def test_chat_takes_tools_too(tooled: tuple[ModelWrapper, Overheard]) -> None:
    model, _ = tooled
    [called] = await model.chat_async([taught.QUESTION], tools=[taught.ADD])
    assert called.response_text == taught.CALL
    untold = await model.convert_messages_to_experience_async(
        [taught.QUESTION, {"role": "assistant", "content": taught.CALL}], tools=[taught.ADD]
    )
    assert untold.tokens.tolist() == called.tokens.tolist()
    assert torch.allclose(untold.logprobs, called.logprobs, atol=1e-5)  # type: ignore[arg-type]
