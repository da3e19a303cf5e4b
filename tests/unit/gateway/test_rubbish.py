"""Rubbish as requests: each is translated, or refused with a sentence; none is a fault of the gateway."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.gateway.serving import serving
from trinity_mq.gateway.app import PROTOCOLS
from trinity_mq.gateway.protocols.base import BadRequest

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("model", "messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "stream_options")
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "text", "tool_use", "tool_result", "x"]
        ),
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | ANYTHING,
        "content": ANYTHING | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": ANYTHING}), max_size=2),
        "name": ANYTHING,
        "output": ANYTHING,
        "input": ANYTHING,
    },
)
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ANYTHING | st.lists(ITEMS | ANYTHING, max_size=3)))


@pytest.mark.parametrize("path", PROTOCOLS)
@settings(max_examples=examples(300), deadline=None)
@given(BODIES)
def test_no_request_is_a_fault(path: str, body: dict[str, Any]) -> None:
    protocol = PROTOCOLS[path]
    with contextlib.suppress(BadRequest):  # refused in words: every other error fails the test
        json.dumps(protocol.request(body).body)


async def test_nor_is_it_over_http() -> None:
    bodies: list[Any] = [
        {"messages": "x", "input": 3, "stream_options": [1]},
        {"messages": [3], "input": [3], "tool_choice": "auto", "tools": 7},
        {"messages": [{"role": "user", "content": {"a": 1}}], "input": [{"type": "message"}], "temperature": "hot"},
        {"prompt": [[]], "messages": {}, "input": {}, "metadata": 3},
    ]
    async with serving(lambda _: "5") as at:
        made = await at.open(record="eval")
        for path in PROTOCOLS:
            for body in bodies:
                status, answer = await at.post(f"/s/{made['id']}{path}", body)
                assert 400 <= status < 500, (path, body, answer)
                assert answer["error"]["message"]
        asked = {"messages": [{"role": "user", "content": "x"}], "temperature": None}
        status, answer = await at.post(f"/s/{made['id']}/v1/chat/completions", asked)
        assert status == 200, answer
