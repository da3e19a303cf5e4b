"""Thoughts and their switches in the three APIs: who may switch them, and which parts they become."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.serving import serving, serving_config, thinking_server
from trinity_mq.gateway.local import local_session
from trinity_mq.gateway.protocols.anthropic import AnthropicProtocol
from trinity_mq.gateway.protocols.base import BadRequest, seal_thoughts, unseal_thoughts
from trinity_mq.gateway.protocols.openai import CHAT, OpenAIProtocol
from trinity_mq.gateway.protocols.responses import ResponsesProtocol
from trinity_mq.models.clients import EngineClients

OFF = "assistant\n<think>\n\n</think>\n\n"
QUESTION = {"role": "user", "content": "2+3?"}


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
