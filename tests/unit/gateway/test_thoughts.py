"""Thoughts and their switches in the three APIs, with unmodified SDKs: out, back in, exactly as sampled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.serving import Serving, serving, serving_config
from tests.unit.models.conftest import VERSION, engine_server
from trinity_mq.gateway.local import local_session
from trinity_mq.gateway.protocols.anthropic import AnthropicProtocol
from trinity_mq.gateway.protocols.base import BadRequest, seal_thoughts, unseal_thoughts
from trinity_mq.gateway.protocols.openai import CHAT, OpenAIProtocol
from trinity_mq.gateway.protocols.responses import ResponsesProtocol
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.sse import AnswerAssembler
from trinity_mq.testing.scripted import CHAT_TEMPLATE, Script, ScriptedGenerator, byte_codec

OFF = "assistant\n<think>\n\n</think>\n\n"
_PAST = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
_SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATE = CHAT_TEMPLATE.replace("{{ message.role }}\n", "{{ message.role }}\n" + _PAST).replace(
    "assistant\n{% endif %}", f"assistant\n{_SWITCH}{{% endif %}}"
)
THOUGHTS = "Two and three,\nso I add."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
FIRST = f"<think>\n{THOUGHTS}\n</think>\n\nLet me see.{CALL}"
SECOND = "<think>\nFive.\n</think>\n\nIt is 5."
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION = {"role": "user", "content": "2+3?"}


@contextlib.asynccontextmanager
async def thinking_server(script: Script) -> AsyncIterator[tuple[InferenceModel, ScriptedGenerator]]:
    generator = ScriptedGenerator(script, codec=byte_codec(TEMPLATE))
    async with engine_server(generator) as server:
        yield InferenceModel("e0", server.url, "tiny", version=VERSION), generator


def check_continued(at: Serving, session: str, first: str) -> None:
    """The second prompt begins with exactly the tokens of the first prompt and its answer."""
    calls = list(at.session(session).calls.values())
    assert [call.continues for call in calls] == ["", first]
    assert at.generator.prompts[1].startswith(at.generator.prompts[0] + FIRST)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    async with serving([FIRST, SECOND], server=thinking_server) as at:
        made = await at.open()
        messages: list[Any] = [QUESTION]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            first, message = await _chat(client, messages, tools, stream)
            assert (message["reasoning_content"], message["content"]) == (THOUGHTS, "Let me see.")
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
            messages += [message, result]
            _, last = await _chat(client, messages, tools, stream)
        assert (last["reasoning_content"], last["content"]) == ("Five.", "It is 5.")
        check_continued(at, made["id"], first)


async def _chat(
    client: openai.AsyncOpenAI, messages: list[Any], tools: Any, stream: bool
) -> tuple[str, dict[str, Any]]:
    if not stream:
        answer = await client.chat.completions.create(model="x", messages=messages, tools=tools)
        return answer.id, answer.choices[0].message.model_dump(exclude_none=True)
    gathered, name, order = AnswerAssembler(), "", list[str]()
    calls: list[Any] = []
    async for chunk in await client.chat.completions.create(model="x", messages=messages, tools=tools, stream=True):
        name = chunk.id
        gathered.add(chunk.model_dump())
        delta = chunk.choices[0].delta.model_dump()
        order += [part for part in ("reasoning_content", "content") if delta.get(part)]
        calls += [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls") or ()]
    assert order == sorted(order, reverse=True), "thoughts come before the text"
    assert set(order) == {"reasoning_content", "content"}
    message = {"role": "assistant", **gathered.answer()["choices"][0]["message"]}
    return name, {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
async def test_openai_responses(stream: bool, sealed: bool) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    options: Any = {"model": "x", "tools": tools, "reasoning": {"effort": "medium", "summary": "auto"}}
    if sealed:
        options["include"] = ["reasoning.encrypted_content"]
    async with serving([FIRST, SECOND], server=thinking_server) as at:
        made = await at.open()
        items: list[Any] = [QUESTION]
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as client:
            first = await _respond(client, items, options, stream)
            thoughts, message, call = first.output
            assert [part.text for part in thoughts.content] == [THOUGHTS]
            assert (message.content[0].text, call.name) == ("Let me see.", "add")
            sent = [item.model_dump(exclude_none=True) for item in first.output]
            if sealed:  # as clients do that keep only the opaque form
                del sent[0]["content"]
            items += [*sent, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
            second = await _respond(client, items, options, stream)
        assert second.output_text == "It is 5."
        check_continued(at, made["id"], first.id)


async def _respond(client: openai.AsyncOpenAI, items: list[Any], options: Any, stream: bool) -> Any:
    if not stream:
        return await client.responses.create(input=items, **options)
    pieces: dict[str, list[str]] = {}
    async with client.responses.stream(input=items, **options) as events:
        async for event in events:
            if event.type in {"response.reasoning_text.delta", "response.output_text.delta"}:
                pieces.setdefault(event.type, []).append(event.delta)
        final: Any = await events.get_final_response()
    assert list(pieces) == ["response.reasoning_text.delta", "response.output_text.delta"]
    assert "".join(pieces["response.reasoning_text.delta"]) == final.output[0].content[0].text
    return final


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_anthropic_messages(stream: bool, display: str) -> None:
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
    options: Any = {"model": "x", "max_tokens": 2048, "tools": tools, "thinking": thinking}
    async with serving([FIRST, SECOND], server=thinking_server) as at:
        made = await at.open()
        messages: list[Any] = [QUESTION]
        async with anthropic.AsyncAnthropic(base_url=made["url"], api_key=made["key"]) as client:
            first = await _message(client, messages, options, stream)
            thoughts, text, call = first.content
            assert thoughts.thinking == (THOUGHTS if display == "summarized" else "")
            assert thoughts.signature
            assert (text.text, call.name) == ("Let me see.", "add")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages.append({"role": "user", "content": [result]})
            second = await _message(client, messages, options, stream)
        assert [block.type for block in second.content] == ["thinking", "text"]
        check_continued(at, made["id"], first.id)


async def _message(client: anthropic.AsyncAnthropic, messages: list[Any], options: Any, stream: bool) -> Any:
    if not stream:
        return await client.messages.create(messages=messages, **options)
    async with client.messages.stream(messages=messages, **options) as events:
        kinds = [event.delta.type async for event in events if event.type == "content_block_delta"]
        final: Any = await events.get_final_message()
    assert kinds.count("signature_delta") == 1
    assert ("thinking_delta" in kinds) == (options["thinking"]["display"] == "summarized")
    return final


OFF_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("chat/completions", {"enable_thinking": False}),
    ("chat/completions", {"reasoning_effort": "none"}),
    ("responses", {"reasoning": {"effort": "none"}}),
    ("responses", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}),
    ("messages", {"chat_template_kwargs": {"enable_thinking": False}}),
]


def _body(route: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"input" if route == "responses" else "messages": [QUESTION], "max_tokens": 99, **fields}


@pytest.mark.parametrize(("route", "fields"), OFF_REQUESTS)
async def test_agents_switch_thinking_off(route: str, fields: dict[str, Any]) -> None:
    async with serving(lambda prompt: "5", server=thinking_server) as at:
        made = await at.open()
        status, answer = await at.post(f"/s/{made['id']}/v1/{route}", _body(route, fields))
        assert status == 200, answer
        assert at.generator.prompts[0].endswith(OFF)


async def test_a_setting_keeps_agents_from_switching() -> None:
    config = serving_config(gateway={"switches": "configured"})
    async with serving(lambda prompt: "5", config=config, server=thinking_server) as at:
        for route, fields in (*OFF_REQUESTS, ("chat/completions", {"reasoning_effort": "low"})):
            status, answer = await at.post(f"/v1/{route}", _body(route, fields))
            assert status == 200, answer
        assert all(prompt.endswith("assistant\n") for prompt in at.generator.prompts)


@pytest.mark.parametrize(
    ("route", "fields", "problem"),
    [
        ("chat/completions", {"reasoning_effort": "low"}, "cannot limit its thoughts"),
        ("chat/completions", {"chat_template_kwargs": {"budget": 1}}, "it reads enable_thinking"),
        ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "set by the rendering"),
        ("chat/completions", {"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ("completions", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort is 'huge', wanted one of none, minimal"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens: Input"),
        ("responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ("responses", {"reasoning": 1}, "reasoning is a int"),
        ("messages", {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            "messages",
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}},
            "output_config.effort is low",
        ),
        ("messages", {"chat_template_kwargs": {"reasoning_effort": "x"}}, "chat_template_kwargs.reasoning_effort is"),
        ("messages", {"max_tokens": "x"}, 'got "x"'),
        ("messages", {"thinking": {"type": ["enabled"]}}, "thinking.type"),
    ],
)
async def test_refused_switches(route: str, fields: dict[str, Any], problem: str) -> None:
    async with serving(["5"], server=thinking_server) as at:
        body = _body(route, fields) if route != "completions" else {"prompt": "2+3=", **fields}
        status, answer = await at.post(f"/v1/{route}", body)
        assert (status, problem in answer["error"]["message"]) == (400, True), answer


async def test_a_program_overrides_the_switches_of_its_taskset() -> None:
    sampling = {"temperature": 1.0, "chat_template_kwargs": {"enable_thinking": False}}
    async with thinking_server(lambda prompt: "5") as (model, generator), EngineClients() as clients:
        limits: Any = {"headers": {}, "not_ready_timeout": 5.0, "request_timeout": 10.0}
        async with local_session(model, clients, sampling=sampling, **limits) as session:
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
                ask: Any = {"model": "x", "messages": [QUESTION]}
                await client.chat.completions.create(**ask)
                await client.chat.completions.create(
                    **ask, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
                )
                await client.completions.create(model="x", prompt="2+3=")
    assert generator.prompts[0].endswith(OFF)
    assert generator.prompts[1].endswith("assistant\n")
    assert generator.prompts[2] == "2+3="


def _chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}], "prompt_token_ids": [1]}


CHUNKS = [_chunk(reasoning="a"), _chunk(content="b"), _chunk(reasoning_content="c"), _chunk(content="d")]
ANSWER = {"choices": [{"message": {"content": "bd", "reasoning_content": "ac"}, "finish_reason": "stop"}]}


def _events(protocol: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = protocol.events("id", body)
    sent = [*events.opening(), *(event for chunk in CHUNKS for event in events.of(chunk)), *events.closing(ANSWER)]
    return [json.loads(event.partition(b"data: ")[2]) for event in sent]


def test_thoughts_between_texts_get_blocks_and_items_of_their_own() -> None:
    blocks = _events(AnthropicProtocol(), {})
    started = [
        (event["index"], event["content_block"]["type"]) for event in blocks if event["type"].endswith("block_start")
    ]
    assert started == [(0, "thinking"), (1, "text"), (2, "thinking"), (3, "text")]
    assert [event["index"] for event in blocks if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    events = _events(ResponsesProtocol(), {})
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"] * 2
    assert [item["content"][0]["text"] for item in items] == ["a", "b", "c", "d"]
    assert len({item["id"] for item in items}) == 4
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_thoughts_of_earlier_answers() -> None:
    blocks = [
        {"type": "thinking", "thinking": "a", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "of another server"},
        {"type": "text", "text": "b"},
        {"type": "thinking", "thinking": "", "signature": seal_thoughts("c")},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    ]
    asked = AnthropicProtocol().request({"messages": [QUESTION, {"role": "assistant", "content": blocks}]})
    message = asked.body["messages"][1]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("a\n\nc", "b", 1)
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": "of another server"},
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
        {"type": "message", "role": "user", "content": "go on"},
        {"type": "reasoning", "encrypted_content": seal_thoughts("end")},
    ]
    messages = ResponsesProtocol().request({"input": items}).body["messages"]
    assert [
        (message["role"], message.get("reasoning_content"), len(message.get("tool_calls", ()))) for message in messages
    ] == [
        ("assistant", None, 0),
        ("assistant", "b", 2),
        ("tool", None, 0),
        ("assistant", "cut", 0),
        ("user", None, 0),
        ("assistant", "end", 0),
    ]


@given(st.text())
def test_sealed_thoughts_come_back(text: str) -> None:
    assert unseal_thoughts(seal_thoughts(text)) == text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["thinking", "tmq1.x", "tmq1.////"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "thinking", "data", "signature", "content", "effort", "text"]), inner
        )
    ),
    max_leaves=8,
)


@given(JSON, JSON, st.sampled_from(["thinking", "redacted_thinking", "reasoning"]))
def test_hostile_thoughts_are_refused_or_read(fields: Any, switches: Any, kind: str) -> None:
    part = {**fields, "type": kind} if isinstance(fields, dict) else fields
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (AnthropicProtocol(), {"messages": [{"role": "assistant", "content": [part]}], "thinking": switches}),
        (ResponsesProtocol(), {"input": [part], "reasoning": switches, "include": ["reasoning.encrypted_content"]}),
        (OpenAIProtocol(CHAT), {"messages": [part], "chat_template_kwargs": switches}),
    ]
    for protocol, body in bodies:
        with contextlib.suppress(BadRequest):
            sent = [message for message in protocol.request(body).body["messages"] if message is not part]
            assert all(isinstance(message.get("reasoning_content", ""), str) for message in sent)
