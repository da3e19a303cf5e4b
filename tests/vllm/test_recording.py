"""What history records is what vLLM sampled, however it was asked: our own engine's tests, on vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from tests.unit.models import talker as taught
from tests.unit.models.test_recording import MESSAGES, ask, assert_equal_to_what_was_sampled
from tests.waiting import until
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.models import InferenceModel, ModelWrapper
from trinity_mq.models.clients import EngineClients

from .conftest import Engine, new_weights, reference
from .overheard import Overheard, serving

VERSION = (1, 7)
CLOSE = 1e-4
Wrap = Callable[..., ModelWrapper]


@pytest.fixture
async def served(waiting: Engine) -> AsyncIterator[tuple[EngineServer, Overheard]]:
    async with serving(waiting.started, VERSION) as served:
        yield served


@pytest.fixture
def heard(served: tuple[EngineServer, Overheard]) -> Overheard:
    return served[1]


@pytest.fixture
async def wrap(served: tuple[EngineServer, Overheard]) -> AsyncIterator[Wrap]:
    async with EngineClients() as clients:
        handle = InferenceModel("e0", served[0].url, "tiny", "/models/tiny", VERSION)
        usual = {"clients": clients, "max_response_tokens": 12, "enable_history": True, "seed": 5, "temperature": 0.7}
        yield lambda **options: ModelWrapper(handle, **{**usual, **options})


@pytest.fixture
async def model(waiting: Engine) -> Any:
    """Random weights, which vLLM has."""
    model = new_weights(waiting.started.folder, 71)
    await waiting.sync(model, VERSION)
    return model


def assert_logprobs_are_those_of(model: Any, recorded: list[Experience]) -> None:
    for experience in recorded:
        prompt, response = experience.tokens[: experience.prompt_length], experience.tokens[experience.prompt_length :]
        expected = reference(model, prompt.tolist(), response.tolist(), 0.7)
        assert experience.logprobs is not None
        torch.testing.assert_close(experience.logprobs, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_chat_is_recorded_as_sampled(
    model: Any, wrap: Wrap, heard: Overheard, sync: bool, stream: bool, n: int
) -> None:
    wrapper = wrap()
    answer = await ask(wrapper, sync=sync, n=n, **({"stream": True} if stream else {}))
    recorded = wrapper.extract_experience_from_history()
    assert len(recorded) == n
    assert_equal_to_what_was_sampled(recorded, heard)
    assert_logprobs_are_those_of(model, recorded)
    assert wrapper.extract_experience_from_history() == []
    assert wrapper.model_version == VERSION
    texts = [""] * n
    for part in answer:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert texts == [completion.text for completion in heard.sampled]


@pytest.mark.usefixtures("model")
async def test_a_stream_comes_in_pieces_and_samples_what_a_whole_answer_does(wrap: Wrap, heard: Overheard) -> None:
    await ask(wrap(), sync=False, n=2)
    chunks = await ask(wrap(), sync=False, n=2, stream=True)
    assert [one.token_ids for one in heard.sampled[:2]] == [one.token_ids for one in heard.sampled[2:]]
    assert max(len(choice.token_ids) for chunk in chunks for choice in chunk.choices) < 12


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions_are_recorded_as_sampled(wrap: Wrap, heard: Overheard, stream: bool) -> None:
    wrapper = wrap()
    async with wrapper.get_openai_async_client() as client:
        answer: Any = await client.completions.create(model="tiny", prompt="+1=", n=2, stream=stream, logprobs=0)
        parts = [chunk async for chunk in answer] if stream else [answer]
    second = [choice.logprobs for part in parts for choice in part.choices if choice.index == 1]
    told = [value for logprobs in second if logprobs for value in logprobs.token_logprobs]
    assert told == heard.sampled[1].logprobs
    assert_equal_to_what_was_sampled(wrapper.extract_experience_from_history(), heard)


@pytest.mark.usefixtures("model")
async def test_usage_and_logprobs_come_where_they_are_asked_for(wrap: Wrap, heard: Overheard) -> None:
    wrapper = wrap()
    chunks = await ask(wrapper, sync=False, stream=True, n=2, logprobs=True, stream_options={"include_usage": True})
    sampled = sum(len(completion.token_ids) for completion in heard.sampled)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(heard.prompts[0]), sampled)
    for index, completion in enumerate(heard.sampled):
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        told = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert told == completion.logprobs
        assert [piece.finish_reason for piece in pieces][-1] == completion.finish_reason
    assert_equal_to_what_was_sampled(wrapper.extract_experience_from_history(), heard)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("sync", [False, True])
async def test_a_stream_left_early_ends_the_sampling_and_is_recorded_as_far_as_it_came(
    wrap: Wrap, heard: Overheard, served: tuple[EngineServer, Overheard], sync: bool
) -> None:
    wrapper = wrap(max_response_tokens=240)
    options: Any = {"model": "tiny", "messages": MESSAGES, "stream": True, "n": 3, "temperature": 1.5}

    def has_tokens(chunk: Any) -> bool:
        return any(choice.token_ids for choice in chunk.choices)

    if sync:

        def work() -> None:
            with wrapper.get_openai_client() as client:
                with client.chat.completions.create(**options) as stream:
                    next(chunk for chunk in stream if has_tokens(chunk))

        await asyncio.to_thread(work)
    else:
        async with wrapper.get_openai_async_client() as client:
            async with await client.chat.completions.create(**options) as stream:
                async for chunk in stream:
                    if has_tokens(chunk):
                        break
    await until(lambda: served[0].batcher.load == 0)
    recorded = wrapper.extract_experience_from_history()
    assert 1 <= len(recorded) <= 3
    assert sum(len(one.token_ids) for one in heard.sampled) < 3 * 240
    for experience in recorded:
        response = experience.tokens[experience.prompt_length :].tolist()
        assert experience.logprobs is not None
        logprobs = experience.logprobs
        begun = [one for one in heard.sampled if one.token_ids[: len(response)] == response]
        assert any(torch.equal(logprobs, torch.tensor(one.logprobs[: len(response)])) for one in begun)


# -- tools


@pytest.fixture
async def talking(waiting: Engine, talker: TextGenerator) -> None:
    """VLLM has the weights that were taught to call a tool."""
    await waiting.sync(talker.model, VERSION)


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_tool_calls_leave_the_text_and_are_recorded_as_sampled(
    wrap: Wrap, heard: Overheard, talker: TextGenerator, sync: bool, stream: bool, n: int
) -> None:
    wrapper = wrap(max_response_tokens=None)
    options: Any = {"messages": [taught.QUESTION], "tools": [taught.ADD], "n": n, "stream": stream}
    answer = await ask(wrapper, sync=sync, **options)
    assert [completion.text for completion in heard.sampled] == [taught.CALL] * n
    recorded = wrapper.extract_experience_from_history()
    assert_equal_to_what_was_sampled(recorded, heard)
    assert_logprobs_are_those_of(talker.model, recorded)
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
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}


@pytest.mark.usefixtures("talking")
async def test_turns_with_a_tool_are_one_experience(wrap: Wrap, heard: Overheard, talker: TextGenerator) -> None:
    wrapper = wrap(max_response_tokens=None)
    messages: list[Any] = [taught.QUESTION]
    tools: Any = [taught.ADD]
    async with wrapper.get_openai_async_client() as client:
        first: Any = await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        message = first.choices[0].message.model_dump(exclude_none=True)
        message["content"] += " "  # the blank before the call was the model's
        message["tool_calls"][0]["id"] = taught.CALL_ID
        messages += [message, {"role": "tool", "tool_call_id": taught.CALL_ID, "content": taught.RESULT}]
        second: Any = await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    assert second.choices[0].message.content == taught.ANSWER
    [merged] = wrapper.extract_experience_from_history(merge_turns=True)
    assert talker.codec.decode([merged.tokens])[0] == taught.WHOLE
    assert merged.action_mask is not None
    assert merged.logprobs is not None
    trained = merged.tokens[merged.prompt_length :][merged.action_mask]
    assert trained.tolist() == heard.sampled[0].token_ids + heard.sampled[1].token_ids
    prompt, response = merged.tokens[: merged.prompt_length].tolist(), merged.tokens[merged.prompt_length :].tolist()
    wanted = reference(talker.model, prompt, response, 0.7)[merged.action_mask]
    torch.testing.assert_close(merged.logprobs[merged.action_mask], wanted, atol=CLOSE, rtol=0)
    assert merged.versions == [(0, *VERSION)]
