"""Answers of other OpenAI-compatible servers, as vLLM 0.32 gave them, and as others may."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp import web

from trinity_mq.experience import Experience
from trinity_mq.models import EngineLost, EngineNotReady, EngineRefused, InferenceModel, ModelWrapper
from trinity_mq.models.recording.sse import MAX_EVENT, AnswerAssembler, EventReader

VLLM: dict[str, str] = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())
MESSAGES: Any = [{"role": "user", "content": "2+3?"}]
Answer = Callable[[dict[str, Any]], web.StreamResponse]


@asynccontextmanager
async def other_server(answer: Answer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives ``answer`` to everything; hands out its URL and what it was asked."""
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append({"headers": request.headers, **await request.json()})
        return answer(asked[-1])

    application = web.Application()
    application.router.add_post("/v1/{rest:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site.port}", asked
    finally:
        await runner.cleanup()


def given(name: str, **headers: str) -> Answer:
    """What vLLM answered."""

    def answer(_: dict[str, Any]) -> web.Response:
        kind = "text/event-stream" if name.endswith("_stream") else "application/json"
        return web.Response(text=VLLM[name], content_type=kind, headers=headers)

    return answer


def wrapper(url: str, **options: Any) -> ModelWrapper:
    handle = InferenceModel("v0", url, "tiny", role=options.pop("role", "rollout"))
    return ModelWrapper(handle, **{"enable_history": True, "temperature": 0.7, **options})


def whole(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(VLLM[name])
    return found


def check(experience: Experience, choice: dict[str, Any], prompt: list[int], version: tuple[int, int] | None) -> None:
    assert experience.tokens.tolist() == prompt + choice["token_ids"]
    assert experience.prompt_length == len(prompt)
    assert experience.logprobs is not None
    wanted = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert torch.equal(experience.logprobs, torch.tensor(wanted, dtype=torch.float32))
    assert experience.versions == (None if version is None else [(0, *version)])
    assert experience.truncate_status == ("response_truncated" if choice["finish_reason"] == "length" else None)


@pytest.mark.parametrize("name", ["chat", "chat_stream"])
async def test_vllm_chat(name: str) -> None:
    async with other_server(given(name, **{"X-TMQ-Version": "1.4"})) as (url, asked):
        model = wrapper(url)
        async with model.get_openai_async_client() as client:
            answer: Any = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, n=2, stream=name.endswith("stream")
            )
            if name.endswith("stream"):
                assert len([chunk async for chunk in answer]) > 10
        recorded = model.extract_experience_from_history()
        assert model.model_version == (1, 4)
        await model.aclose()
    assert len(recorded) == 2
    for experience, choice in zip(recorded, whole("chat")["choices"], strict=True):
        check(experience, choice, [20, 13, 21, 33], (1, 4))
        assert experience.response_text == choice["message"]["content"]
        assert experience.prompt_text == "2+3?"
    assert asked[0]["return_token_ids"] is True
    assert asked[0]["logprobs"] is True
    assert asked[0]["temperature"] == 0.7


@pytest.mark.parametrize("name", ["chat_tools", "chat_tools_stream"])
async def test_vllm_tool_calls(name: str) -> None:
    async with other_server(given(name)) as (url, _):
        model = wrapper(url)
        async with model.get_openai_async_client() as client:
            answer: Any = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=name.endswith("stream")
            )
            if name.endswith("stream"):
                assert [chunk async for chunk in answer]
        [experience] = model.extract_experience_from_history()
        await model.aclose()
    [choice] = whole("chat_tools")["choices"]
    check(experience, choice, whole("chat_tools")["prompt_token_ids"], None)
    content, _, call = str(experience.response_text).partition("<tool_call>")
    assert content.strip() == "Let me see:"
    assert json.loads(call.removesuffix("</tool_call>")) == {"name": "add", "arguments": {"a": 2, "b": 3}}


@pytest.mark.parametrize("name", ["completion", "completion_stream"])
async def test_vllm_text_completions(name: str) -> None:
    async with other_server(given(name)) as (url, asked):
        model = wrapper(url)
        if name == "completion":
            recorded = await model.generate_async(["[add]2+3?\n"], n=2)
            assert recorded == model.extract_experience_from_history()
        else:
            async with model.get_openai_async_client() as client:
                answer: Any = await client.completions.create(model="tiny", prompt="[add]2+3?\n", stream=True)
                assert [chunk async for chunk in answer]
            recorded = model.extract_experience_from_history()
        await model.aclose()
    assert asked[0]["logprobs"] == 0
    for experience, choice in zip(recorded, whole("completion")["choices"], strict=False):
        assert experience.tokens.tolist() == choice["prompt_token_ids"] + choice["token_ids"]
        assert experience.logprobs is not None
        wanted = torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32)
        assert torch.equal(experience.logprobs, wanted)
        assert experience.response_text == "Let me"


async def test_vllm_chat_by_the_wrapper_with_versions_of_each_token() -> None:
    answer = whole("chat")
    for choice in answer["choices"]:
        choice["weight_versions"] = [[0, 1, 4], [3, 1, 5]]
    answer["choices"][0]["finish_reason"] = "abort"
    async with other_server(lambda _: web.json_response(answer)) as (url, asked):
        model = wrapper(url)
        experiences = await model.chat_async(MESSAGES, n=2)
        assert model.model_version == (1, 5)
        await model.aclose()
    assert [(e.version_min, e.version_max) for e in experiences] == [((1, 4), (1, 5))] * 2
    assert experiences[0].truncate_status == "response_truncated"
    assert asked[0]["headers"]["X-TMQ-Logprobs"] == "numbers"


PLAIN = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "judge",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "8"}, "finish_reason": "stop"}],
}


async def test_a_judge_that_gives_text_only_is_no_rollout_model() -> None:
    async with other_server(lambda _: web.json_response(PLAIN)) as (url, asked):
        judge = wrapper(url, role="auxiliary", enable_history=False)
        async with judge.get_openai_async_client() as client:
            said = await client.chat.completions.create(model="judge", messages=MESSAGES)
        assert said.choices[0].message.content == "8"
        assert {"return_token_ids", "logprobs", "seed", "max_prompt_tokens"} & asked[0].keys() == set()
        [experience] = await judge.chat_async(MESSAGES)
        assert experience.response_text == "8"
        assert experience.info == {"text_only": True}
        assert experience.action_mask is not None
        assert not experience.action_mask.any()
        for model in (wrapper(url), wrapper(url, role="auxiliary")):
            with pytest.raises(EngineRefused, match="return_token_ids"):
                await model.chat_async(MESSAGES)
            async with model.get_openai_async_client() as client:
                with pytest.raises(EngineRefused, match="return_token_ids"):
                    await client.chat.completions.create(model="judge", messages=MESSAGES)
            assert model.extract_experience_from_history() == []
            await model.aclose()
        await judge.aclose()


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("not JSON", "application/json", EngineLost),
        ("[1]", "application/json", EngineLost),
        ("data: {broken\n\n", "text/event-stream", EngineLost),
        ('data: {"error": {"message": "gone", "code": "engine_stopping"}}\n\n', "text/event-stream", EngineNotReady),
        ('data: {"error": "out of memory"}\n\n', "text/event-stream", EngineRefused),
    ],
)
async def test_what_is_no_answer_is_named(text: str, kind: str, error: type[Exception]) -> None:
    async with other_server(lambda _: web.Response(text=text, content_type=kind)) as (url, _):
        model = wrapper(url, not_ready_timeout=0.0)
        async with model.get_openai_async_client() as client:
            with pytest.raises(error):
                await _read(client, stream=kind == "text/event-stream")
        assert model.extract_experience_from_history() == []
        await model.aclose()


async def _read(client: openai.AsyncOpenAI, stream: Any) -> None:
    answer: Any = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
    if stream:
        assert [chunk async for chunk in answer]


async def test_an_engine_without_weights_is_waited_for_by_streams_too() -> None:
    answers = iter([web.json_response({}, status=503, headers={"Retry-After": "0"}), given("chat_stream")({})])
    async with other_server(lambda _: next(answers)) as (url, asked):
        model = wrapper(url)
        async with model.get_openai_async_client() as client:
            stream: Any = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stream=True)
            assert [chunk async for chunk in stream]
        assert len(model.extract_experience_from_history()) == 2
        await model.aclose()
    assert len(asked) == 2
    assert asked[0].get("seed") == asked[1].get("seed")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    text = (
        b'data: {"a": "\xc3\xa9"}\r\n\r\n: a comment\n\ndata: [1,\ndata: 2]\nid: 3\n\ndata: [DONE]\n\ndata: {"late": 1}'
    )
    reader = EventReader()
    found = [event for start in range(0, len(text), size) for event in reader.feed(text[start : start + size])]
    assert found == [{"a": "\u00e9"}, [1, 2]]


def test_a_long_answer_is_assembled_in_little_time() -> None:
    assembler, tokens = AnswerAssembler(), 100_000
    started = time.process_time()
    for token in range(tokens):
        assembler.add({"choices": [{"token_ids": [token], "token_logprobs": [-1.0], "delta": {"content": "a"}}]})
    assert time.process_time() - started < 2.0
    [choice] = assembler.answer()["choices"]
    assembler.add({"choices": [{"token_ids": [7], "token_logprobs": [-1.0], "finish_reason": "stop"}]})
    assert choice["token_ids"] == list(range(tokens))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a" * tokens, None)


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    reader = EventReader()
    assert reader.feed(b"data: " + b"x" * (MAX_EVENT - 10)) == []
    with pytest.raises(ValueError, match=f"over {MAX_EVENT} bytes"):
        reader.feed(b"12345")
