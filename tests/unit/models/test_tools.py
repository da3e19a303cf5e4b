"""Tools offered and calls understood, hostile ones too."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.engines.server.openai.streaming import TextFlow
from trinity_mq.families.division import Marks
from trinity_mq.families.hermes import MAX_CALLS, parse_tool_calls
from trinity_mq.testing.scripted import byte_codec

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_understood() -> None:
    content, calls = parse_tool_calls(f"I add. \n{CALL}\n{CALL}")
    assert content == "I add."
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert parse_tool_calls('<tool_call>{"name": "f"}')[1][0]["function"] == {"name": "f", "arguments": "{}"}, (
        "no closing tag"
    )
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": "x"}')[1][0]["function"]["arguments"] == "x"


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f"</tool_call>',
        f"{CALL}<tool_call>no</tool_call>",
        "<tool_call>" + "[" * 100_000,
        "<tool_call>" + '{"name":' * 50_000,
        CALL * (MAX_CALLS + 1),
        '<tool_call>{"name": "f", "arguments": "' + "x" * 400_000 + '"}',
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "prompt", "content", "names"),
    [
        (f"<think>I could: {CALL} No.</think>\nI will not.", None, None, []),
        (f"I could: {CALL} No.</think>\nI will not.", "ask<think>\n", None, []),
        (f"I could: {CALL} No, I", "ask<think>\n", None, []),
        (f"<think>I could: {CALL} No, I", None, None, []),
        (f"<think>{CALL}</think>{CALL}", None, f"<think>{CALL}</think>", ["add"]),
        (
            f"<think>I write a <tool_call> now.</think>\n{CALL}",
            None,
            "<think>I write a <tool_call> now.</think>",
            ["add"],
        ),
        (f"I write a <tool_call> now.</think>\n{CALL}", "ask<think>", "I write a <tool_call> now.</think>", ["add"]),
        (f"<think>a</think>{CALL}<think>{CALL}? No.</think>{CALL}", None, "<think>a</think>", ["add", "add"]),
        (f"{CALL}<think>{CALL}", None, "", ["add"]),
    ],
)
def test_a_call_inside_thoughts_is_text(text: str, prompt: str | None, content: str | None, names: list[str]) -> None:
    found, calls = parse_tool_calls(text, prompt)
    assert found == (text if content is None else content)
    assert [call["function"]["name"] for call in calls] == names


def test_tags_in_the_arguments_of_a_call_stay_in_them() -> None:
    for words in ("<think>a</think>", "a</think>", "<think>"):
        call = CALL.replace("1", json.dumps(words))
        _, [found] = parse_tool_calls(f"<think>hm</think>{call}")
        assert json.loads(found["function"]["arguments"]) == {"a": words}


def test_megabytes_of_tags_take_no_time() -> None:
    started = time.process_time()
    for text in ("<tool_call>" * 300_000, "<tool_call" * 300_000, CALL * 50_000, "<tool_call>{" * 300_000):
        assert parse_tool_calls(text) == (text, [])
    assert time.process_time() - started < 5.0


@settings(deadline=None)  # the first call imports transformers
@given(
    st.text(alphabet="ab <é€😀\n", max_size=30),
    st.lists(st.integers(1, 5), max_size=60),
    st.sampled_from([(), ("b<",), ("ab", "<é")]),
    st.booleans(),
)
def test_a_text_that_flows_is_the_whole_text(text: str, cuts: list[int], stops: tuple[str, ...], tools: bool) -> None:
    codec = byte_codec()
    ids = codec.encode(text)
    flow = TextFlow(codec.decode, Marks(calls=("<a",) if tools else ()), stops=stops)
    end = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    given_out, place = "", 0
    for size in cuts:
        given_out += flow.add(ids[place : place + size]).content
        place += size
        assert text[:end].startswith(given_out), "never more than is certain"
        assert not tools or "<a" not in given_out
    assert given_out + flow.finish(None, text[:end]).content == text[:end]
