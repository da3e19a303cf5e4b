"""Streamed answers and whole answers of every family: the same parts, in linear time, whatever the model writes."""

import itertools
import json
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.engines.server.openai.streaming import TextFlow
from trinity_mq.families.division import AnswerFlow, divide
from trinity_mq.families.family import Family, ParsedAnswer
from trinity_mq.families.table import FAMILIES
from trinity_mq.testing.scripted import byte_codec

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "sure": {"type": "boolean"}}},
    },
}
ROWS = {family.name: family for family in FAMILIES}
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
BAR, LOW = "\uff5c", "\u2581"


def marked(text: str) -> str:
    """Return a text with DeepSeek's special tokens, which are written as {words}."""
    return text.replace("{", f"<{BAR}").replace("}", f"{BAR}>").replace("_", LOW)


BLOCK = 'function{tool_sep}add\n```json\n("a": 1)\n```'
CALLS = {
    "deepseek": marked(f"{{tool_calls_begin}}{{tool_call_begin}}{BLOCK}{{tool_call_end}}{{tool_calls_end}}"),
    "deepseek-v3.1": marked('{tool_calls_begin}{tool_call_begin}add{tool_sep}("a": 1){tool_call_end}{tool_calls_end}'),
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "nemotron": XML,
    "qwen3.5": XML,
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "gpt-oss": '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "gemma": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "phi": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
}
CALLS = {name: text.replace('("a": 1)', '{"a": 1}') for name, text in CALLS.items()}


def written(family: Family, thoughts: str, content: str, calls: str) -> str:
    """Return an answer in the form of a family."""
    assert family.thoughts is not None
    opening, closing = family.thoughts
    header = "<|start|>assistant<|channel|>final<|message|>" if family.name == "gpt-oss" and content else ""
    return (f"{opening}{thoughts}{closing}" if thoughts else "") + header + content + calls


def streamed(family: Family, text: str, cuts: list[int], prompt_end: str | None = None) -> tuple[str, str]:
    """Return thoughts and content that a stream of pieces of a text emits."""
    codec, answer = byte_codec(), family.read(text, prompt_end, [TOOL])
    flow, ids = TextFlow(codec.decode, family.marks_of([TOOL]), prompt_end=prompt_end), byte_codec().encode(text)
    parts, place = [], 0
    for size in [*cuts, len(ids)]:
        parts.append(flow.add(ids[place : place + size]))
        place += size
    whole = [*parts, flow.finish(answer.thoughts, answer.content)]
    return "".join(part.thoughts for part in whole), "".join(part.content for part in whole)


def answers() -> Iterator[tuple[Family, str]]:
    for name, calls in CALLS.items():
        for thoughts, content, ending in itertools.product(
            ("", "I think\n`</think>` é "), ("", "Well, <b> 😀"), ("", calls)
        ):
            yield ROWS[name], written(ROWS[name], thoughts, content, ending)


def test_every_row_has_an_answer_here() -> None:
    assert set(CALLS) == set(ROWS)


@pytest.mark.parametrize("name", CALLS)
def test_thoughts_content_and_calls_are_read(name: str) -> None:
    family = ROWS[name]
    answer = family.read(written(family, "Hm.", "I add.\n", CALLS[name]), "", [TOOL])
    assert (answer.thoughts, answer.content, answer.malformed) == ("Hm.", "I add.", 0)
    assert [call["function"] for call in answer.calls] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert family.read(CALLS[name], "", None).calls == []
    malformed = family.read("I add." + CALLS[name].partition("1")[0], "", [TOOL])
    assert (malformed.calls, malformed.malformed) == ([], 1)
    assert malformed.content.startswith("I add.")


@pytest.mark.parametrize("name", CALLS)
def test_a_broken_call_behind_a_whole_one_makes_the_answer_malformed(name: str) -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"  # Kimi's, around all calls
    broken = CALLS[name].partition("1")[0].removeprefix(begin)
    answer = ROWS[name].read(CALLS[name].removesuffix(end) + broken, "", [TOOL])
    assert (answer.calls, answer.malformed > 0) == ([], True)
    assert answer.content.endswith(broken[-5:])


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gpt-oss", CALLS["gpt-oss"] + ' to=functions.add<|message|>{"a": 2}<|call|>'),
        ("phi", 'functools[{"name": "add"}] and functools[{"name": "add"}]'),
        ("deepseek", CALLS["deepseek"].replace(marked("{tool_sep}"), "")),
        ("deepseek", CALLS["deepseek"].replace(marked("{tool_sep}add"), "")),
    ],
)
def test_a_call_without_its_mark_or_in_another_place_makes_the_answer_malformed(name: str, answer: str) -> None:
    read = ROWS[name].read(answer, "", [TOOL])
    assert (read.calls, read.malformed) == ([], 1)
    assert read.content == answer.removeprefix("<|start|>assistant")


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_says_what_the_whole_answer_says_however_it_is_cut(name: str) -> None:
    for family, text in answers():
        if family.name == name:
            answer = family.read(text, "", [TOOL])
            for size in range(1, 12):
                assert streamed(family, text, [size] * len(text), "") == (answer.thoughts or "", answer.content)


PIECES = sorted(
    {mark for family in FAMILIES for mark in (*family.calls_begin, *family.headers, *(family.thoughts or ()))}
    | {" ", "\n", "a", "<", "[", "{", "`", "é", "</tool_call>", "functions.add", '{"a": 1}'}
)


@settings(deadline=None)  # the first call imports transformers
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(1, 9), max_size=20),
    st.sampled_from(["", "ask<think>\n", "ask[THINK]", "ask<|channel|>analysis<|message|>"]),
)
def test_a_stream_of_hostile_text_says_what_the_whole_answer_says(
    family: Family, text: str, cuts: list[int], prompt_end: str
) -> None:
    answer = family.read(text, prompt_end, [TOOL])
    assert streamed(family, text, cuts, prompt_end) == (answer.thoughts or "", answer.content)


@given(st.sampled_from(FAMILIES), st.text(max_size=40))
def test_a_text_without_marks_is_the_content(family: Family, text: str) -> None:
    if not any(piece in text for piece in PIECES if len(piece) > 1) and not text.startswith(("{", "[")):
        assert family.read(text, "", [TOOL]) == ParsedAnswer(text)


HOSTILE = (
    "<",
    "<|",
    "<think",
    "<tool_call>",
    "<function=",
    "<parameter=a>",
    '<invoke name="a">',
    "<arg_key>",
    " ",
    "\n",
    "[",
    '{"a":',
    "\ufffd",
)


@pytest.mark.parametrize("name", CALLS)
def test_hostile_answers_take_linear_time(name: str) -> None:
    family = ROWS[name]
    started = time.process_time()
    for begin in ("", family.calls_begin[0], family.thoughts.opening if family.thoughts else ""):
        for piece in (*HOSTILE, *family.calls_begin):
            answer = family.read(begin + piece * (100_000 // len(piece)), "", [TOOL])
            assert len(answer.content) <= 200_100
    assert time.process_time() - started < 20.0


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_calls_are_plain_json(name: str) -> None:
    family, fails = ROWS[name], pytest.fail
    nested = ("[" * depth + "]" * depth for depth in range(500, 1000, 10))
    for value in ("NaN", "-Infinity", "1e999", "9" * 5000, *nested):
        answer = family.read(CALLS[name].replace("1", value), "", [TOOL])
        assert bool(answer.calls) != bool(answer.malformed)
        for call in answer.calls:
            json.loads(call["function"]["arguments"], parse_constant=fails)


@pytest.mark.parametrize("name", ["glm", "kimi", "minimax", "nemotron", "qwen3.5", "gemma4", "hermes", "mistral"])
def test_calls_of_a_quarter_of_a_megabyte_are_read(name: str) -> None:
    for size, calls in ((250_000, 1), (270_000, 0)):
        text = "x" * size if name in {"glm", "minimax", "nemotron", "qwen3.5"} else f'"{"x" * size}"'
        answer = ROWS[name].read(CALLS[name].replace("1", text), "", [TOOL])
        assert (len(answer.calls), answer.malformed) == (calls, 1 - calls)


@pytest.mark.parametrize("blanks", [" ", "\n", "\n`", " ```"])
def test_a_block_of_code_without_its_end_takes_linear_time(blanks: str) -> None:
    begin, end = marked("{tool_calls_begin}{tool_call_begin}function{tool_sep}add\n```"), marked("{tool_call_end}")
    started = time.process_time()
    for inside in ("", '{"a": 1}'):
        answer = ROWS["deepseek"].read(begin + inside + blanks * 20_000 + "x" + end, "", [TOOL])
        assert (answer.calls, answer.malformed) == ([], 1)
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("name", ["deepseek", "deepseek-v3.1"])
def test_a_template_of_any_deepseek_reads_the_calls_of_all(name: str) -> None:
    second = CALLS["deepseek"].replace("add", "sub").partition(marked("{tool_calls_begin}"))[2]
    texts = CALLS["deepseek"], CALLS["deepseek-v3.1"], CALLS["deepseek"].partition(marked("{tool_calls_end}"))[0] + "\n"
    for text in (*texts, texts[2] + second):
        answer = ROWS[name].read("Well. " + text, "", [TOOL])
        names = [call["function"]["name"] for call in answer.calls]
        assert (answer.content, names, answer.malformed) == ("Well.", ["add", "sub"][: len(names)], 0)
        assert len(names) == 1 + (text not in texts)
        assert {call["function"]["arguments"] for call in answer.calls} == {'{"a": 1}'}


def test_a_hostile_stream_takes_linear_time() -> None:
    def seconds(size: int, piece: str) -> float:
        flow, started = AnswerFlow(ROWS["hermes"].marks_of([TOOL]), ""), time.process_time()
        for _ in range(size):
            flow.add(piece)
        flow.finish()
        return time.process_time() - started

    for piece in (" ", "<think", "<tool_call", "a", "`", "\n<think>x</think>\n"):
        seconds(1_000, piece)
        assert seconds(80_000, piece) < 12 * seconds(20_000, piece) + 0.2, piece


def test_text_is_emitted_as_it_grows() -> None:
    flow = AnswerFlow(ROWS["hermes"].marks_of([TOOL]), "")
    emitted = [flow.add(letter) for letter in "<think>abc</think>def<tool_call>x"]
    assert [delta.thoughts for delta in emitted if delta.thoughts] == ["a", "b", "c"]
    assert [delta.content for delta in emitted if delta.content] == ["d", "e", "f"]
    assert flow.finish() == ("abc", "def", "<tool_call>x")


def test_thoughts_are_read_where_the_prompt_or_the_answer_opens_them() -> None:
    marks = ROWS["hermes"].marks_of([TOOL])
    assert divide("a</think>b", marks, "ask<think>\n") == ("a", "b", "")
    assert divide("a</think>b", marks, "ask") == (None, "a</think>b", "")
    assert divide("<think>a", marks, "ask") == ("a", "", "")
    assert divide("<think>\n\n</think>\n\nb \n", marks, "ask") == (None, "b \n", "")
    assert divide("x <think>a</think> y <think>b</think>z", marks, "") == ("a\n\nb", "x  y z", "")


def test_a_boolean_and_an_unknown_parameter_reach_the_client() -> None:
    text = XML.replace(
        "</function>", "<parameter=sure>\nTrue\n</parameter>\n<parameter=why>\nno {\n</parameter>\n</function>"
    )
    [call] = ROWS["qwen3.5"].read(text, "", [TOOL]).calls
    assert call["function"]["arguments"] == '{"a": 1, "sure": true, "why": "no {"}'
