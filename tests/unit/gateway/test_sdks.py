"""Unmodified SDKs against the gateway: text, tools and streams, in each API; what is recorded is what was sampled."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.gateway.serving import Serving, serving
from trinity_mq.gateway.recorded_call import prompt_of
from trinity_mq.testing.scripted import END, byte_codec

TOOL_CALL = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION = {"role": "user", "content": "2+3?"}


def check_recorded(at: Serving, session: str, *texts: str) -> None:
    """The answers are recorded token by token, each prompt continuing the turn before."""
    found = at.session(session)
    calls = list(found.calls.values())
    codec = byte_codec()
    assert [codec.decode([call.choices[0].ids])[0] for call in calls] == [text + END for text in texts]
    for number, call in enumerate(calls):
        assert codec.decode([prompt_of(call, found.calls)])[0] == at.generator.prompts[number]
        assert len(call.choices[0].logprobs) == len(call.choices[0].ids)
        assert call.choices[0].versions == [(0, 1, 0)]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat_with_a_tool(stream: bool) -> None:
    async with serving([TOOL_CALL, "It is 5."]) as at:
        made = await at.open()
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            first = await _chat(client, [QUESTION], tools, stream)
            assert first["content"] == "Let me see."
            (call,) = first["tool_calls"]
            assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 2, "b": 3})
            said = {"id": call["id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
            answered = {"role": "assistant", "content": first["content"], "tool_calls": [said]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            second = await _chat(client, [QUESTION, answered, result], tools, stream)
        assert second["content"] == "It is 5."
        check_recorded(at, made["id"], TOOL_CALL, "It is 5.")
        assert [call.continues for call in at.session(made["id"]).calls.values()] == ["", first["id"]]


async def _chat(client: openai.AsyncOpenAI, messages: list[Any], tools: Any, stream: bool) -> dict[str, Any]:
    if not stream:
        answer = await client.chat.completions.create(model="gpt-x", messages=messages, tools=tools)
        message = answer.choices[0].message
        assert answer.model == "gpt-x"
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        calls = [{"id": one.id, **one.function.model_dump()} for one in message.tool_calls or ()]  # type: ignore[union-attr]
        return {"id": answer.id, "content": message.content, "tool_calls": calls}
    content, calls, name, pieces = "", list[dict[str, Any]](), "", 0
    async for chunk in await client.chat.completions.create(
        model="gpt-x", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
    ):
        name = chunk.id
        if not chunk.choices:
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens > 0
            continue
        delta = chunk.choices[0].delta
        pieces += bool(delta.content)
        content += delta.content or ""
        for one in delta.tool_calls or ():
            assert one.function is not None
            calls.append({"id": one.id, "name": one.function.name, "arguments": one.function.arguments})
    assert pieces
    return {"id": name, "content": content, "tool_calls": calls}


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses_with_a_tool(stream: bool) -> None:
    async with serving([TOOL_CALL, "It is 5."]) as at:
        made = await at.open()
        tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            items: list[Any] = [QUESTION]
            first = await _respond(client, items, tools, stream)
            (message, call) = first.output
            assert message.content[0].text == "Let me see."
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 2, "b": 3})
            items += [one.model_dump(exclude_none=True) for one in first.output]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
            second = await _respond(client, items, tools, stream)
        assert second.output_text == "It is 5."
        assert second.status == "completed"
        check_recorded(at, made["id"], TOOL_CALL, "It is 5.")
        assert [call.continues for call in at.session(made["id"]).calls.values()] == ["", first.id]


async def _respond(client: openai.AsyncOpenAI, items: list[Any], tools: Any, stream: bool) -> Any:
    if not stream:
        return await client.responses.create(model="gpt-x", input=items, tools=tools)
    async with client.responses.stream(model="gpt-x", input=items, tools=tools) as events:
        pieces = [event.delta async for event in events if event.type == "response.output_text.delta"]
        final = await events.get_final_response()
    assert pieces
    assert "".join(pieces) == final.output_text
    return final


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages_with_a_tool(stream: bool) -> None:
    async with serving([TOOL_CALL, "It is 5."]) as at:
        made = await at.open()
        tools: Any = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
        async with anthropic.AsyncAnthropic(base_url=made["url"], api_key=made["key"]) as client:
            messages: list[Any] = [QUESTION]
            first = await _message(client, messages, tools, stream)
            (text, call) = first.content
            assert (text.type, text.text) == ("text", "Let me see.")
            assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 2, "b": 3})
            assert first.stop_reason == "tool_use"
            messages.append({"role": "assistant", "content": [one.model_dump() for one in first.content]})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages.append({"role": "user", "content": [result]})
            second = await _message(client, messages, tools, stream)
        assert second.content[0].text == "It is 5."
        assert second.stop_reason == "end_turn"
        assert second.usage.input_tokens == len(byte_codec().encode(at.generator.prompts[1]))
        check_recorded(at, made["id"], TOOL_CALL, "It is 5.")
        assert [call.continues for call in at.session(made["id"]).calls.values()] == ["", first.id]


async def _message(client: anthropic.AsyncAnthropic, messages: list[Any], tools: Any, stream: bool) -> Any:
    asked: Any = {"model": "claude-x", "max_tokens": 512, "system": "Be brief.", "messages": messages, "tools": tools}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        pieces = [piece async for piece in events.text_stream]
        final = await events.get_final_message()
    assert pieces
    return final


async def test_text_completions_and_models() -> None:
    async with serving(["said"]) as at:
        made = await at.open()
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            answer = await client.completions.create(model="gpt-x", prompt="say", max_tokens=64)
            assert answer.choices[0].text == "said"
            assert [model.id async for model in client.models.list()] == ["t-tiny"]
            with pytest.raises(openai.BadRequestError, match="one prompt a request"):
                await client.completions.create(model="gpt-x", prompt=["a", "b"])
        check_recorded(at, made["id"], "said")


@pytest.mark.parametrize("where", ["path", "bearer", "header"])
async def test_a_session_is_known_by_path_key_or_header(where: str) -> None:
    async with serving(["hello"], admin="an admin's secret key") as at:
        made = await at.open(key="an admin's secret key")
        base, key, headers = {
            "path": (made["base_url"], made["key"], {}),
            "bearer": (f"{at.url}/v1", made["key"], {}),
            "header": (f"{at.url}/v1", made["key"], {"X-Session-ID": made["id"]}),
        }[where]
        async with openai.AsyncOpenAI(base_url=base, api_key=key, default_headers=headers) as client:
            await client.chat.completions.create(model="x", messages=[QUESTION])  # type: ignore[list-item]
        check_recorded(at, made["id"], "hello")
