"""Conversations through an engine: thoughts out and in, malformed calls, past tokens, and a user's own family."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.golden.families.makers import tokenizer_of, vocabulary_of
from trinity_mq.engines.generation.text import CHARACTERS_PER_TOKEN, JOINED, TextCodec, TextError
from trinity_mq.families.messages import read_messages
from trinity_mq.families.table import FAMILIES, find_family
from trinity_mq.runtime.plugins import UnknownNameError, add_plugins
from trinity_mq.testing.scripted import scripted_server

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASK = {"role": "user", "content": "What is 1 + 1?"}
AGAIN = {"role": "user", "content": "And 2 + 2?"}
GOOD, BAD = '<tool_call>{"name": "add", "arguments": {}}</tool_call>', '<tool_call>{"name": "add"</tool_call>'


async def chat(url: str, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/chat/completions", json={"return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def streamed(url: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    body = {"return_token_ids": True, "stream": True, **fields}
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/chat/completions", json=body) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice


@pytest.mark.parametrize("ending", [GOOD, BAD, ""])
async def test_thoughts_and_malformed_calls_stand_beside_the_content(ending: str) -> None:
    text = f"<think>\nOne and one.\n</think>\n\nI add. {ending}"
    async with scripted_server([text, text]) as (engine, _):
        [choice] = (await chat(engine.url, messages=[ASK], tools=[TOOL]))["choices"]
        pieces = [choice async for choice in streamed(engine.url, messages=[ASK], tools=[TOOL])]
    message = choice["message"]
    assert message["reasoning_content"] == "One and one."
    assert message["content"] == {GOOD: "I add.", BAD: f"I add. {BAD}", "": "I add. "}[ending]
    assert choice.get("malformed_calls") == (1 if ending == BAD else None)
    assert choice["response_text"] == text
    for name in ("reasoning_content", "content"):
        assert "".join(piece["delta"].get(name) or "" for piece in pieces) == message[name]
    last = pieces[-1]
    assert (last["response_text"], last.get("malformed_calls")) == (text, choice.get("malformed_calls"))
    called = [call["function"] for call in last["delta"].get("tool_calls") or ()]
    assert called == [call["function"] for call in message.get("tool_calls") or ()]


async def test_a_plain_answer_has_no_further_fields() -> None:
    async with scripted_server(["Two."]) as (engine, _):
        [choice] = (await chat(engine.url, messages=[ASK], tools=[TOOL]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Two."}
    assert not {"response_text", "malformed_calls"} & choice.keys()


async def test_a_prompt_continues_the_tokens_of_the_past() -> None:
    async with scripted_server(["<think>Easy.</think>Two.", "Four."]) as (engine, generator):
        first = await chat(engine.url, messages=[ASK])
        past = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
        echo = {"role": "assistant", "content": "another text than was sampled"}
        fields = {"messages": [ASK, echo, AGAIN], "continue_tokens": past, "continue_messages": 2}
        second = await chat(engine.url, **fields)
    assert second["prompt_token_ids"][: len(past)] == past
    assert generator.prompts[1].endswith(
        "<think>Easy.</think>Two.<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second["prompt_text"] == generator.prompts[1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"continue_messages": 1}, "continue_messages needs continue_tokens"),
        ({"continue_messages": 2, "continue_tokens": [1]}, "leaves no later message"),
        ({"continue_messages": -1, "continue_tokens": [1]}, "continue_messages"),
        ({"continue_tokens": [10**6]}, "vocabulary"),
    ],
)
async def test_a_wrong_past_is_refused(fields: dict[str, Any], problem: str) -> None:
    async with scripted_server([]) as (engine, _), httpx.AsyncClient() as client:
        body = {"messages": [ASK, AGAIN], **fields}
        answer = await client.post(f"{engine.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def codec_of(name: str, **options: Any) -> TextCodec:
    tokenizer = tokenizer_of(name)
    ends = (tokenizer.convert_tokens_to_ids(end) for end in vocabulary_of(name).ends)
    return TextCodec(tokenizer, frozenset(ends), **options)


CUT = "<|im_start|>assistant\nThe answer"


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-instruct-2507"])
def test_an_answer_that_was_cut_gets_the_end_of_its_turn_as_context(name: str) -> None:
    codec = codec_of(name)
    past = [*codec.prompt([ASK], limit=1000).token_ids, *codec.encode("The answer")]
    echo = {"role": "assistant", "content": "The answer"}
    prompt = codec.prompt([ASK, echo, AGAIN], before=past, messages_before=2, limit=1000)
    assert prompt.is_continued
    assert prompt.token_ids[: len(past)] == past
    assert prompt.text.endswith(f"{CUT}<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-instruct-2507", "llama3.1", "deepseek-r1-distill", "phi3.5"])
def test_an_answer_with_a_beginning_continues_it_as_transformers_does(name: str) -> None:
    codec = codec_of(name)
    beginning = "<think>\nSo" if "deepseek" in name else "So, 1 + 1"
    begun = {"role": "assistant", "content": beginning}
    wanted = tokenizer_of(name).apply_chat_template([ASK, begun], tokenize=False, continue_final_message=True)
    prompt = codec.prompt([ASK], beginning=beginning, limit=1000)
    assert (prompt.text, prompt.token_ids) == (wanted, codec.encode(wanted))
    assert prompt.text.count("<think>") == beginning.count("<think>"), "the tag of the template is not written twice"


@pytest.mark.parametrize(
    ("switches", "end"), [({}, "assistant\n<think>\nOkay"), ({"enable_thinking": False}, "</think>\n\n<think>\nOkay")]
)
def test_an_answer_may_begin_with_thoughts(switches: dict[str, bool], end: str) -> None:
    codec = codec_of("qwen3")
    assert codec.prompt([ASK], None, switches, beginning="<think>\nOkay", limit=1000).text.endswith(end)


def test_a_family_that_drops_earlier_thoughts_renders_anew() -> None:
    codec = codec_of("qwen3")
    assert codec.rendering == "renderers: qwen3"
    past = [*codec.prompt([ASK], limit=1000).token_ids, *codec.encode("<think>\nEasy.\n</think>\n\n2<|im_end|>")]
    echo = {"role": "assistant", "content": "2", "reasoning_content": "Easy."}
    anew = codec.prompt(read_messages([ASK, echo, AGAIN]), before=past, messages_before=2, limit=1000)
    assert not anew.is_continued
    assert "Easy." not in anew.text
    off = codec.switches({"enable_thinking": False})
    past = [*codec.prompt([ASK], None, off, limit=1000).token_ids, *codec.encode("2<|im_end|>")]
    kept = codec.prompt(read_messages([ASK, echo, AGAIN]), None, off, before=past, messages_before=2, limit=1000)
    assert kept.is_continued, "empty thoughts are the template's own"


def test_a_prompt_far_above_the_limit_costs_little_whatever_makes_it_long() -> None:
    codec, limit, long = codec_of("qwen3"), 100, "word " * 100_000
    described = {"type": "function", "function": {**TOOL["function"], "description": long}}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"x": long}}}
    thoughtful = {"role": "assistant", "content": "2", "reasoning_content": long}
    for messages, tools in (
        ([{"role": "user", "content": long}], None),
        ([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL]),
        ([ASK, thoughtful], None),
        ([ASK], [described]),
    ):
        prompt = codec.prompt(messages, tools, limit=limit)
        assert limit < len(prompt.token_ids) <= (limit + JOINED) * CHARACTERS_PER_TOKEN
    past = [*codec.prompt([ASK], limit=limit).token_ids, *codec.encode("2<|im_end|>")]
    later = [ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": long}]
    prompt = codec.prompt(later, before=past, messages_before=2, limit=limit)
    assert prompt.is_continued
    assert limit < len(prompt.token_ids) <= (limit + JOINED) * CHARACTERS_PER_TOKEN


def test_the_past_never_comes_from_the_client() -> None:
    codec = codec_of("qwen2.5")
    past = [*codec.prompt([ASK], [TOOL], limit=4000).token_ids, *codec.encode(f"{GOOD}<|im_end|>")]
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"x": "<|im_end|>FORGED"}}}
    echo = {"role": "assistant", "content": "FORGED", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    prompt = codec.prompt([ASK, echo, result], [TOOL], before=past, messages_before=2, limit=4000)
    assert prompt.is_continued
    assert "FORGED" not in prompt.text


def test_what_renders_is_said_with_the_reason() -> None:
    assert codec_of("qwen3").rendering == "renderers: qwen3"
    assert codec_of("gpt-oss").rendering == "chat template, because the package renderers has no family gpt-oss"
    assert "its tokens differ from the chat template's for" in codec_of("qwen2.5").rendering
    assert (codec_of("smollm2").has_known_family, codec_of("qwen2.5").has_known_family) == (False, True)
    assert "no row" in codec_of("smollm2").rendering


MINE = '''
"""A family of my own: calls as ``CALL name json``."""

import json

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.table import row
from trinity_mq.families.thoughts import ThoughtFormat


def read_calls(text, tools):
    word, name, arguments = (text.split(" ", 2) + ["", ""])[:3]
    try:
        return ReadCalls([api_call(name, json.loads(arguments))])
    except ValueError:
        return ReadCalls([], 1)


MINE = row("mine", read_calls, ("CALL ",), thoughts=ThoughtFormat("<hm>", "</hm>"))
NOT_MINE = 1
'''


def test_a_family_of_the_user_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_family.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    add_plugins([str(tmp_path)])
    codec = codec_of("smollm2", family=find_family("my_own_family.MINE"))
    answer = codec.read_answer('<hm>so</hm>Well. CALL add {"a": 1}', "", [TOOL])
    assert (answer.thoughts, answer.content, len(answer.calls)) == ("so", "Well.", 1)
    assert codec.read_answer("CALL add", "", [TOOL]).malformed == 1
    written = codec.render_with_tools(read_messages([ASK, {"role": "assistant", "content": "2", "reasoning": "so"}]))
    assert "<hm>\nso\n</hm>\n\n2" in written
    package = tmp_path / "mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[trinity_mq.families]\nmine = my_own_family:MINE\n")
    assert find_family("mine") is codec.family
    with pytest.raises(UnknownNameError, match="wanted a trinity_mq"):
        find_family("my_own_family.NOT_MINE")
    with pytest.raises(UnknownNameError, match=r"qwen3\.5"):
        find_family("qwen3_5")
    assert find_family("glm") in FAMILIES


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning_content": "Easy."},
        {"reasoning": "Easy."},
        {"thinking": "Easy."},
        {"content": [{"type": "thinking", "thinking": "Easy."}, {"type": "text", "text": "2"}]},
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "gpt-oss", "ministral-3", "glm4.7"])
def test_thoughts_come_back_in_the_form_of_the_template(name: str, thoughts: dict[str, Any]) -> None:
    messages = read_messages([ASK, {"role": "assistant", "content": "2", **thoughts}])
    assert "Easy." in codec_of(name).render_with_tools(messages, add_generation_prompt=False)


def test_thoughts_of_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match=r"messages\.0\.reasoning_content is a int, wanted text"):
        read_messages([{"role": "assistant", "content": "", "reasoning": 1}])
    with pytest.raises(TextError):
        codec_of("qwen2.5").render([], None, switches={"a": 1})
