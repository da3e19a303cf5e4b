"""The wrapper that workflows are handed, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.models import (
    EngineClients,
    EngineNotReady,
    EngineRefused,
    ModelWrapper,
    VersionMismatch,
)
from trinity_mq.models.recording.responses import experiences_of
from trinity_mq.models.recording.sse import AnswerAssembler

MESSAGES = [{"role": "user", "content": "+372="}]
Wrap = Callable[..., ModelWrapper]


@pytest.fixture
async def server(serving: Any, shared_generator: TextGenerator) -> AsyncIterator[EngineServer]:
    async with serving(shared_generator) as server:
        yield server


@pytest.fixture
def wrap(server: EngineServer, handle_of: Any, clients: EngineClients) -> Wrap:
    return lambda **options: ModelWrapper(
        handle_of(server), **{"clients": clients, "max_response_tokens": 6, **options}
    )


def same(left: list[Experience], right: list[Experience]) -> bool:
    return [e.tokens.tolist() for e in left] == [e.tokens.tolist() for e in right]


async def test_chat_gives_experiences_with_everything_the_trainer_needs(
    wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any
) -> None:
    model = wrap(temperature=0.7, seed=1)
    experiences = await model.chat_async(MESSAGES, n=16)
    assert len(experiences) == 16
    prompt = shared_generator.codec.encode("+372=")
    for experience in experiences:
        response = experience.tokens[5:].tolist()
        assert experience.tokens[:5].tolist() == prompt
        assert experience.prompt_length == 5
        assert experience.prompt_text == "+372="
        assert experience.response_text == shared_generator.codec.decode([[t for t in response if t != 1]])[0]
        assert experience.experience_type == "single_turn"
        assert experience.temperature == 0.7
        assert experience.versions == [(0, 1, 7)]
        assert experience.reward is None
        assert experience.truncate_status == (None if response[-1] == 1 else "response_truncated")
        assert experience.logprobs is not None
        wanted = plain_logprobs(shared_generator, prompt, response, 0.7)
        assert torch.allclose(experience.logprobs, wanted, atol=1e-5, rtol=0)
    assert model.model_version == (1, 7)
    assert (model.model_name, model.model_path) == ("tiny", "/models/tiny")
    assert len({experience.eid.uid for experience in experiences}) == 16
    assert Experience.deserialize_many(Experience.serialize_many(experiences)) == experiences


async def test_a_seeded_run_repeats_itself_call_by_call(wrap: Wrap) -> None:
    first, second = wrap(seed=5), wrap(seed=5)
    ones = [await first.chat_async(MESSAGES, n=4) for _ in range(2)]
    twos = [await second.chat_async(MESSAGES, n=4) for _ in range(2)]
    assert all(same(one, two) for one, two in zip(ones, twos, strict=True))
    assert not same(ones[0], ones[1]), "each call has a seed of its own"
    assert not same(ones[0], await wrap(seed=6).chat_async(MESSAGES, n=4))
    clones = [first.clone_with_isolated_history(), first.clone_with_isolated_history()]
    said = [await clone.chat_async(MESSAGES, n=4) for clone in clones]
    assert not same(said[0], said[1])


async def test_parameters_of_a_call_beat_rollout_args_beat_the_wrappers_own(wrap: Wrap) -> None:
    model = wrap(rollout_args={"max_tokens": 2, "n": 2, "temperature": 0.5})
    experiences = await model.chat_async(MESSAGES)
    assert len(experiences) == 2
    assert max(e.response_length for e in experiences) <= 2
    assert {e.temperature for e in experiences} == {0.5}
    [greedy] = await model.chat_async(MESSAGES, n=1, temperature=0)
    assert greedy.temperature == 1.0, "at temperature 0 the logprobs are those of temperature 1"


async def test_logprobs(wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any) -> None:
    tokens = [3, 4, 5, 6]
    model = wrap(temperature=0.7)
    for temperature, found in (
        (0.7, await model.logprobs_async(tokens)),
        (1.0, await model.logprobs_async(tokens, 1.0)),
        (0.7, await asyncio.to_thread(model.logprobs, torch.tensor(tokens))),
    ):
        assert found.dtype == torch.float32
        wanted = plain_logprobs(shared_generator, tokens[:1], tokens[1:], temperature)
        assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    with pytest.raises(EngineRefused, match="token id 99, the vocabulary has 0 to 15"):
        await model.logprobs_async([3, 99])


async def test_convert_messages_to_experience(wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any) -> None:
    conversation = [
        {"role": "user", "content": "+12="},
        {"role": "assistant", "content": "22"},
        {"role": "user", "content": "-12="},
        {"role": "assistant", "content": "1"},
    ]
    model = wrap(temperature=0.7)
    experience = await model.convert_messages_to_experience_async(conversation)
    assert experience == _with_eid(
        experience, await asyncio.to_thread(model.convert_messages_to_experience, conversation)
    )
    tokens = [*shared_generator.codec.encode("+12=22-12=1"), shared_generator.codec.end_id]
    assert experience.tokens.tolist() == tokens
    assert experience.prompt_length == 4
    assert experience.experience_type == "multi_turn"
    assert experience.action_mask is not None
    assert experience.action_mask.tolist() == [True, True, False, False, False, False, True, True]
    assert experience.logprobs is not None
    assert torch.allclose(
        experience.logprobs, plain_logprobs(shared_generator, tokens[:4], tokens[4:], 0.7), atol=1e-5, rtol=0
    )
    assert experience.messages == conversation
    assert experience.versions == [(0, 1, 7)]
    assert experience.temperature == 0.7
    assert experience.truncate_status is None
    long = [*conversation, {"role": "assistant", "content": "1" * 80}]
    cut = await model.convert_messages_to_experience_async(long)
    assert cut.truncate_status == "response_truncated"
    assert len(cut.tokens) == 64
    with pytest.raises(ValueError, match="no token of the assistant"):
        await model.convert_messages_to_experience_async(conversation[:1])


def _with_eid(source: Experience, target: Experience) -> Experience:
    target.eid = source.eid
    return target


async def test_an_engine_without_weights_is_waited_for(
    serving: Any, shared_generator: TextGenerator, handle_of: Any, clients: EngineClients
) -> None:
    async with serving(shared_generator, version=None) as server:
        impatient = ModelWrapper(handle_of(server), clients=clients, not_ready_timeout=0.0, enable_history=True)
        with pytest.raises(EngineNotReady, match="waits for its first weights") as caught:
            await impatient.chat_async(MESSAGES)
        assert caught.value.retry_after == 1.0
        async with impatient.get_openai_async_client() as client:
            with pytest.raises(EngineNotReady):
                await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        asked = asyncio.create_task(ModelWrapper(handle_of(server), clients=clients).chat_async(MESSAGES))
        await asyncio.sleep(0.1)
        assert not asked.done()
        server.state.phase, server.state.version = "current", (1, 7)
        assert len(await asked) == 1


async def test_pins_and_refusals(wrap: Wrap) -> None:
    assert await wrap(pinned=(1, 7)).chat_async(MESSAGES)
    for ask in (
        lambda: wrap(pinned=(1, 6)).chat_async(MESSAGES),
        lambda: asyncio.to_thread(wrap(pinned=(1, 6)).chat, MESSAGES),
    ):
        with pytest.raises(VersionMismatch) as caught:
            await ask()
        assert (caught.value.wanted, caught.value.held) == ((1, 6), (1, 7))
    with pytest.raises(EngineRefused, match="unknown option 'temprature'") as refused:
        await wrap().chat_async(MESSAGES, temprature=1)
    assert refused.value.status == 400


@pytest.mark.parametrize("value", ["null", "NaN", "-Infinity", "Infinity", "-9999.0"])
def test_a_token_without_a_finite_logprob_costs_no_answer(value: str) -> None:
    """As JSON holds it, streamed or not; -9999 is what vLLM writes for minus infinity."""
    sampled = {"token_ids": [5, 6, 7], "token_logprobs": [-1.5, json.loads(value), -0.5], "finish_reason": "stop"}
    whole = {"index": 0, "message": {"content": "1"}, **sampled}
    gathered = AnswerAssembler()
    gathered.add({"prompt_token_ids": [3, 4], "choices": [{**whole, "delta": {"content": "1"}}]})
    for answer in ({"prompt_token_ids": [3, 4], "choices": [whole]}, gathered.answer()):
        [found] = experiences_of(answer, 1.0)
        assert found.experience_type == "single_turn"
        assert found.tokens.tolist() == [3, 4, 5, 6, 7]
        assert found.action_mask is not None
        assert found.logprobs is not None
        assert found.action_mask.tolist() == [True, False, True]
        assert found.logprobs.tolist() == [-1.5, 0.0, -0.5]
        assert found.metrics == {"unknown_logprobs:sum": 1}
        assert Experience.deserialize(found.serialize()) == found
