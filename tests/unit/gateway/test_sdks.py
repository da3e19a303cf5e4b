"""Unmodified SDKs against the gateway: text, thoughts, tools and streams, in each API; what is recorded is what was
sampled, and what comes back continues it.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.gateway.serving import Serving, serving, thinking_server
from trinity_mq.gateway.recorded_call import prompt_of
from trinity_mq.models.recording.sse import AnswerAssembler
from trinity_mq.testing.scripted import END

THOUGHTS = "Two and three,\nso I add."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PLAIN = f"Let me see.{CALL}", "It is 5."
THINKING = f"<think>\n{THOUGHTS}\n</think>\n\n{PLAIN[0]}", f"<think>\nFive.\n</think>\n\n{PLAIN[1]}"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION = {"role": "user", "content": "2+3?"}
STREAMED = pytest.mark.parametrize("stream", [False, True])
ANSWERS = pytest.mark.parametrize("answers", [PLAIN, THINKING], ids=["plain", "thinking"])


def check_recorded(at: Serving, session: str, first: str, *texts: str) -> None:
    """The answers are recorded token by token, and each prompt continues the turn before, exactly as sampled."""
    calls = at.session(session).calls
    codec = at.generator.codec
    assert [codec.decode([call.choices[0].ids])[0] for call in calls.values()] == [text + END for text in texts]
    for number, call in enumerate(calls.values()):
        assert codec.decode([prompt_of(call, calls)])[0] == at.generator.prompts[number]
        assert len(call.choices[0].logprobs) == len(call.choices[0].ids)
        assert call.choices[0].versions == [(0, 1, 0)]
    assert [call.continues for call in calls.values()] == ["", first][: len(texts)]
    if len(texts) > 1:
        assert at.generator.prompts[1].startswith(at.generator.prompts[0] + texts[0])


@STREAMED
@ANSWERS
async def test_openai_chat_with_a_tool(stream: bool, answers: tuple[str, str]) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    async with serving(list(answers), server=thinking_server) as at:
        made = await at.open()
        messages: list[Any] = [QUESTION]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            first, message = await _chat(client, messages, tools, stream)
            assert (message.get("reasoning_content"), message["content"]) == (
                THOUGHTS if answers is THINKING else None,
                "Let me see.",
            )
            [call] = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
            _, last = await _chat(client, messages, tools, stream)
        assert last["content"] == "It is 5."
        check_recorded(at, made["id"], first, *answers)


async def _chat(
    client: openai.AsyncOpenAI, messages: list[Any], tools: Any, stream: bool
) -> tuple[str, dict[str, Any]]:
    options: Any = {"model": "gpt-x", "messages": messages, "tools": tools}
    if not stream:
        answer = await client.chat.completions.create(**options)
        assert (answer.model, answer.usage is not None and answer.usage.completion_tokens > 0) == ("gpt-x", True)
        return answer.id, answer.choices[0].message.model_dump(exclude_none=True)
    gathered, name, order, sampled = AnswerAssembler(), "", list[str](), 0
    calls: list[Any] = []
    async for chunk in await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        name = chunk.id
        gathered.add(chunk.model_dump())
        sampled += chunk.usage.completion_tokens if chunk.usage else 0
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            order += [part for part in ("reasoning_content", "content") if delta.get(part)]
            calls += [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls") or ()]
    assert sampled > 0
    assert order == sorted(order, reverse=True), "thoughts come before the text"
    assert "content" in order
    message = {"role": "assistant", **gathered.answer()["choices"][0]["message"]}
    return name, {**message, "tool_calls": calls} if calls else message


@STREAMED
@pytest.mark.parametrize(
    ("answers", "sealed"), [(PLAIN, False), (THINKING, False), (THINKING, True)], ids=["plain", "thinking", "sealed"]
)
async def test_openai_responses_with_a_tool(stream: bool, answers: tuple[str, str], sealed: bool) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    options: Any = {"model": "gpt-x", "tools": tools}
    if answers is THINKING:
        options["reasoning"] = {"effort": "medium", "summary": "auto"}
    if sealed:
        options["include"] = ["reasoning.encrypted_content"]
    async with serving(list(answers), server=thinking_server) as at:
        made = await at.open()
        items: list[Any] = [QUESTION]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            first = await _respond(client, items, options, stream)
            *thoughts, message, call = first.output
            assert [part.text for item in thoughts for part in item.content] == [THOUGHTS] * (answers is THINKING)
            assert message.content[0].text == "Let me see."
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 2, "b": 3})
            sent = [item.model_dump(exclude_none=True) for item in first.output]
            if sealed:  # as clients do that keep only the opaque form
                del sent[0]["content"]
            items += [*sent, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
            second = await _respond(client, items, options, stream)
        assert (second.output_text, second.status) == ("It is 5.", "completed")
        check_recorded(at, made["id"], first.id, *answers)


async def _respond(client: openai.AsyncOpenAI, items: list[Any], options: Any, stream: bool) -> Any:
    if not stream:
        return await client.responses.create(input=items, **options)
    pieces: dict[str, list[str]] = {}
    async with client.responses.stream(input=items, **options) as events:
        async for event in events:
            if event.type in {"response.reasoning_text.delta", "response.output_text.delta"}:
                pieces.setdefault(event.type, []).append(event.delta)
        final: Any = await events.get_final_response()
    assert "".join(pieces["response.output_text.delta"]) == final.output_text
    if "reasoning" in options:
        assert list(pieces) == ["response.reasoning_text.delta", "response.output_text.delta"]
        assert "".join(pieces["response.reasoning_text.delta"]) == final.output[0].content[0].text
    return final


@STREAMED
@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
async def test_anthropic_messages_with_a_tool(stream: bool, display: str | None) -> None:
    answers = PLAIN if display is None else THINKING
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    options: Any = {"model": "claude-x", "max_tokens": 2048, "system": "Be brief.", "tools": tools}
    if display:
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024, "display": display}
    async with serving(list(answers), server=thinking_server) as at:
        made = await at.open()
        messages: list[Any] = [QUESTION]
        async with anthropic.AsyncAnthropic(base_url=made["url"], api_key=made["key"]) as client:
            first = await _message(client, messages, options, stream)
            *thoughts, text, call = first.content
            assert [block.thinking for block in thoughts] == {None: [], "summarized": [THOUGHTS]}.get(display, [""])
            assert all(block.signature for block in thoughts)
            assert (text.type, text.text) == ("text", "Let me see.")
            assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 2, "b": 3})
            assert first.stop_reason == "tool_use"
            messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages.append({"role": "user", "content": [result]})
            second = await _message(client, messages, options, stream)
        assert second.content[-1].text == "It is 5."
        assert [block.type for block in second.content] == ["thinking", "text"][display is None :]
        assert second.stop_reason == "end_turn"
        assert second.usage.input_tokens == len(at.generator.codec.encode(at.generator.prompts[1]))
        check_recorded(at, made["id"], first.id, *answers)


async def _message(client: anthropic.AsyncAnthropic, messages: list[Any], options: Any, stream: bool) -> Any:
    if not stream:
        return await client.messages.create(messages=messages, **options)
    async with client.messages.stream(messages=messages, **options) as events:
        kinds = [event.delta.type async for event in events if event.type == "content_block_delta"]
        final: Any = await events.get_final_message()
    display = options.get("thinking", {}).get("display")
    assert "text_delta" in kinds
    assert (kinds.count("signature_delta"), "thinking_delta" in kinds) == (bool(display), display == "summarized")
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
        check_recorded(at, made["id"], "", "said")


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
        check_recorded(at, made["id"], "", "hello")
