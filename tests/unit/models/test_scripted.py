"""The scripted model of the test kit: the real server, with what is said decided by a test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trinity_mq.models import EngineRefused
from trinity_mq.testing.scripted import logprob, scripted_model, scripted_server

MESSAGES: Any = [{"role": "user", "content": "Qu'est-ce que c'est ? 😀"}]


async def test_it_says_its_script_in_order_and_is_recorded() -> None:
    async with scripted_model(["un é", "deux €", "trois"], version=(2, 3)) as model:
        said = await model.chat_async(MESSAGES, n=2)
        [third] = await asyncio.to_thread(model.chat, MESSAGES)
        assert [e.response_text for e in [*said, third]] == ["un é", "deux €", "trois"]
        assert third.logprobs is not None
        assert third.logprobs.tolist() == [logprob(place) for place in range(6)]
        assert third.versions == [(0, 2, 3)]
        assert model.extract_experience_from_history() == [*said, third]
        with pytest.raises(EngineRefused, match="the script has nothing left to say"):
            await model.chat_async(MESSAGES)


async def test_it_streams_and_calls_tools() -> None:
    text = 'Voilà <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool: Any = {"type": "function", "function": {"name": "f"}}
    async with scripted_model(lambda prompt: text) as model, model.get_openai_async_client() as client:
        stream: Any = await client.chat.completions.create(
            model="scripted", messages=MESSAGES, tools=[tool], stream=True
        )
        pieces = [chunk.choices[0] async for chunk in stream]
        assert "".join(piece.delta.content or "" for piece in pieces) == "Voilà"
        assert pieces[-1].finish_reason == "tool_calls"
        assert pieces[-1].delta.tool_calls[0].function.name == "f"
        [recorded] = model.extract_experience_from_history()
        assert recorded.response_text == text


async def test_stop_strings_and_limits_hold() -> None:
    async with scripted_model(lambda prompt: "one. two") as model:
        [stopped] = await model.chat_async(MESSAGES, stop=".")
        assert stopped.response_text == "one"
        [cut] = await model.chat_async(MESSAGES, max_tokens=5)
        assert (cut.response_text, cut.truncate_status) == ("one. ", "response_truncated")


async def test_what_it_was_asked_can_be_read() -> None:
    async with scripted_server(["x"]) as (handle, generator):
        from trinity_mq.models import ModelWrapper

        model = ModelWrapper(handle)
        await model.chat_async(MESSAGES)
        await model.aclose()
    assert generator.prompts == [f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"]
