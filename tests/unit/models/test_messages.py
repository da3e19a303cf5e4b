"""Messages in every form that clients and files give them, in chat templates of several families."""

from pathlib import Path
from typing import Any

import pytest

from tests.chat_codec import codec_of, tokenizer_of, trained
from trinity_mq.engines.generation.text import MaskedTokens, TextCodec, TextError
from trinity_mq.families.messages import MAX_ROLE_CHARACTERS, MessageError, read_messages, read_tools, without_nulls
from trinity_mq.families.table import FAMILIES, family_of

ROOT = Path(__file__).parents[3]
HEAD = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
ASKED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
WRITTEN = "{{- m.content + '<|im_end|>\n' }}"
CHATML = HEAD + WRITTEN + "{%- endfor %}" + ASKED


def guarded(condition: str, otherwise: str = "") -> str:
    """Return ChatML that writes a message only where the condition holds."""
    written = "{%- if " + condition + " %}" + HEAD.partition("%}")[2] + WRITTEN + "{%- else %}" + otherwise
    return "{%- for m in messages %}" + written + "{%- endif %}{%- endfor %}" + ASKED


NO = "{{- raise_exception('no') }}"
SKIPS = guarded("m.role in ('system', 'user', 'assistant')")
HERMES = (
    "{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}"
    + HEAD
    + "{{- m.content }}{%- for c in m.tool_calls or [] %}{{- c.function.name }}{{- c.function.arguments | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}" + ASKED
)
USER, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TURNS = [USER, SAY, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [called({"a": 1})]},
        {"role": "assistant", "content": None, "tool_calls": [called('{"a": 1}')]},
        {"role": "assistant", "tool_calls": [called('{"a": 1}', index=None)], "name": None, "refusal": None},
        {"role": "assistant", "content": [], "tool_calls": [called({"a": 1})], "function_call": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "", "image_url": None}],
            "tool_calls": [called({"a": 1})],
        },
    ],
)
def test_a_call_has_the_same_form_whoever_wrote_it(message: dict[str, Any]) -> None:
    assert read_messages([USER, message, SAY])[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [called({"a": 1})],
    }


def test_keys_that_hold_null_are_no_keys_and_the_form_before_tool_calls_is_read() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    [parted, empty, old] = read_messages(
        [
            {"role": "user", "content": parts, "tool_calls": None, "tool_call_id": None},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": ""}},
        ]
    )
    assert parted == {"role": "user", "content": "ab"}
    assert empty == {"role": "assistant", "content": ""}
    [broken] = read_messages([{"role": "assistant", "tool_calls": [called("{no")]}])
    assert broken["tool_calls"] == [called("{no")], "arguments that are no JSON stay text"
    assert old["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    stored = {"a": None, "b": [{"c": None, "d": 1}, None], "e": {"f": None}}
    assert without_nulls(stored) == {"b": [{"d": 1}, None], "e": {}}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("x", "m.0.role"),
        ({"content": "x"}, "m.0.role"),
        ({"role": "r" * (MAX_ROLE_CHARACTERS + 1), "content": "x"}, "m.0.role"),
        ({"role": "user", "content": 3}, "m.0.content"),
        ({"role": "user", "content": ["x"]}, "m.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "text": None}]}, "m.0.content"),
        ({"role": "assistant", "tool_calls": "[]"}, "m.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}, "m.0.tool_calls.0"),
    ],
)
def test_another_form_is_refused_with_its_place(message: Any, where: str) -> None:
    with pytest.raises(MessageError, match=r"wanted|give") as caught:
        read_messages([message], "m")
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("template", "role", "wanted"),
    [
        (CHATML, "developer", "<|im_start|>system\ns<|im_end|>"),
        (CHATML, "function", "<|im_start|>tool\ns<|im_end|>"),
        (CHATML, "critic", "<|im_start|>critic\ns<|im_end|>"),
        (guarded("m.role != 'system'"), "developer", "<|im_start|>developer\ns<|im_end|>"),
        (guarded("m.role != 'system'", NO), "developer", "<|im_start|>developer\ns<|im_end|>"),
        (guarded("m.role != 'developer'", NO), "developer", "<|im_start|>system\ns<|im_end|>"),
    ],
)
def test_a_role_gets_the_name_that_the_template_has_a_place_for(template: str, role: str, wanted: str) -> None:
    assert wanted in codec_of(template).render_with_tools([{"role": role, "content": "s"}, USER], None)


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([{"role": "critic", "content": "s"}, USER], None, r"the role critic \(messages.0\)"),
        ([USER, SAY, {"role": "tool", "content": "a"}], None, r"the role tool \(messages.2\)"),
        ([USER, SAY, {"role": "function", "content": "a"}], None, r"the role tool \(messages.2\)"),
        ([USER, {**SAY, "tool_calls": [called({})]}, USER], None, r"tool calls \(messages.1\)"),
        ([USER], [TOOL], "does not write tools"),
    ],
)
def test_what_a_template_does_not_write_is_refused_in_each_way_of_reading(
    messages: list[dict[str, Any]], tools: Any, says: str
) -> None:
    codec = codec_of(SKIPS)
    for _ in range(2):  # from the cache too
        with pytest.raises(TextError, match=says):
            codec.render_with_tools(messages, tools)
    with pytest.raises(TextError, match=says):
        codec.conversation([*messages, SAY], tools)
    assert "critic" not in codec.render_with_tools([{"role": "critic", "content": ""}, USER], None), "nothing is lost"


def test_a_long_conversation_and_a_new_template_are_looked_at_too() -> None:
    tokenizer = tokenizer_of(CHATML)
    codec = TextCodec(tokenizer, codec_of(CHATML).stop_ids)
    critic = [*(TURNS * 80), {"role": "critic", "content": "s"}]
    assert "critic" in codec.render_with_tools(critic, None)
    assert "critic" in codec.render_with_tools(critic[-2:], None)
    tokenizer.chat_template = SKIPS
    for messages in (critic, critic[-2:]):
        with pytest.raises(TextError, match="the role critic"):
            codec.render_with_tools(messages, None)


def test_a_template_that_refuses_the_probe_alone_reads_the_messages() -> None:
    strict = guarded("messages[0].content == 'a'", NO)
    assert codec_of(strict).render_with_tools([USER], None).startswith("<|im_start|>user\na")
    with pytest.raises(TextError, match="refuses these messages: no"):
        codec_of(strict).render_with_tools([SAY], None)


ALTERNATING = """\
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("a system message begins a chat") }}
{%- elif not loop.first and message.role == loop.previtem.role %}{{ raise_exception("roles alternate") }}{% endif %}
<{{ message.role }}>{{ message.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("developer developer user user", "<system>0\n\n1<user>2\n\n3"),
        ("system user system assistant user", "<system>0<user>1\n\n2<assistant>3<user>4"),
        ("user assistant system", "<user>0<assistant>1<user>2"),
    ],
)
def test_system_messages_in_any_place_are_written_by_a_template_that_wants_one_at_the_beginning(
    roles: str, wanted: str
) -> None:
    codec = codec_of(ALTERNATING)
    messages = read_messages([{"role": role, "content": f"{place}"} for place, role in enumerate(roles.split())])
    assert codec.render_with_tools(messages).replace("\n<", "<") == wanted
    behind = [*messages, {"role": "assistant", "content": "5"}, {"role": "user", "content": "6"}]
    if messages[-1]["role"] != "assistant":
        assert codec.render_with_tools(behind).replace("\n<", "<").startswith(wanted)


def test_a_family_that_takes_arguments_as_text_gets_text() -> None:
    deepseek = HERMES.replace("c in m.tool_calls", "tool in m.tool_calls").replace(
        "{{- c.function.name }}{{- c.function.arguments | tojson }}",
        "{{- tool['function']['name'] + '\n' + tool['function']['arguments'] + '\n' }}",
    )
    assert (FAMILIES[0].name, FAMILIES[-1].name) == ("deepseek", "hermes")
    assert (family_of(deepseek).name, family_of(HERMES).name, family_of("").name) == ("deepseek", "hermes", "hermes")
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        messages = read_messages([USER, {"role": "assistant", "tool_calls": [called(arguments)]}])
        assert 'add\n{"a": "é"}\n<|im_end|>' in codec_of(deepseek).render_with_tools(messages, None)
        assert 'add{"a": "é"}<|im_end|>' in codec_of(HERMES).render_with_tools(messages, None)


BEGIN, END = "{% generation %}", "{% endgeneration %}"
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}" + ASKED
)


FORMS = ("generation %}", "- generation %}", "- generation -%}", " generation -%}", "+ generation +%}", "generation%}")


@pytest.mark.parametrize("form", [*FORMS, "-\n generation\n-%}"])
def test_marks_count_in_every_form_of_white_space_control(form: str) -> None:
    asked = ASKED.replace("assistant\n", "assistant\n<think>")  # not what the marks hold
    codec = codec_of(MARKED.replace(BEGIN, "{%" + form).replace(ASKED, asked))
    assert trained(codec, codec.conversation(TURNS)) == ["b<|im_end|>", "d<|im_end|>"]


LATE_END = "}}" + END + "{{- '<|im_end|>' }}"
HEAD_INSIDE = MARKED.replace("{{- '<|im_start|>' + m.role + '\n' }}{%- if", "{%- if").replace(
    "{%- else %}", "{%- else %}{{- '<|im_start|>' + m.role + '\n' }}"
)
LINE_INSIDE = MARKED.replace("+ '\n' }}{%- if", "}}{%- if").replace("{%- else %}", "{%- else %}{{- '\n' }}")
TEMPLATES = {
    "no marks": MARKED.replace(BEGIN, "").replace(END, ""),
    "marks in a comment": "{#- {% generation %} -#}" + CHATML,
    "marks that end before the end": MARKED.replace("+ '<|im_end|>' }}" + END, LATE_END),
    "white space before the end": MARKED.replace("+ '<|im_end|>' }}" + END, LATE_END.replace("'<", "'\n<")),
    "marks that end behind the end": MARKED.replace(END + "{{- '\n' }}", "{{- '\n' }}" + END),
    "marks around the head": HEAD_INSIDE.replace(BEGIN, BEGIN + "{{- '<|im_start|>assistant\n' }}"),
    "marks around the line of the head": LINE_INSIDE.replace(BEGIN, BEGIN + "{{- '\n' }}"),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_turn_is_what_an_engine_would_have_sampled_up_to_its_first_end(template: str) -> None:
    codec = codec_of(template)
    texts = trained(codec, codec.conversation(TURNS))
    assert [text.replace("\n", "") for text in texts] == ["b<|im_end|>", "d<|im_end|>"]
    assert not any(text.endswith("\n") or text.startswith("\n") for text in texts)


GLM = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>\n' }}{{- m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
MARKS = "{%- if m.role == 'assistant' %}" + BEGIN + "{{- m.content }}" + END + "{%- else %}{{- m.content }}{%- endif %}"


def test_the_next_roles_token_ends_a_turn_and_the_last_turn_gets_an_end() -> None:
    ends, others = ("<|endoftext|>", "<|user|>", "<|tool|>"), ("<|assistant|>",)
    turns = [*TURNS, {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f"}]
    for form in (GLM, GLM.replace("{{- m.content }}", MARKS)):
        codec = codec_of(form, ends, others)
        assert trained(codec, codec.conversation(turns)) == ["b<|user|>", "d<|tool|>", "f<|endoftext|>"]
        assert trained(codec, codec.conversation(turns[:3])) == ["b<|user|>"]


PHI = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"
)


def test_a_second_end_is_not_trained_on_where_an_engine_stops_at_the_first() -> None:
    both = codec_of(PHI, ("<|endoftext|>", "<|end|>", "<|assistant|>"), ("<|user|>",))
    assert trained(both, both.conversation(TURNS)) == ["b<|end|>", "d<|end|>"]
    assert trained(both, both.conversation(TURNS[:2])) == ["b<|end|>"]
    only_last = codec_of(PHI, ("<|endoftext|>",), ("<|end|>", "<|user|>", "<|assistant|>"))
    assert trained(only_last, only_last.conversation(TURNS[:2])) == ["b<|end|>\n<|endoftext|>"]
    with pytest.raises(TextError, match="differently once another message follows"):
        only_last.conversation(TURNS)  # the engine would have sampled an end that the conversation lacks


def test_the_template_for_qwen3_keeps_the_thoughts_of_every_turn() -> None:
    codec = codec_of((ROOT / "examples/templates/qwen3.jinja").read_text())
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb", "tool_calls": [called('{"a": 1}')] * 2}
    answers = [{"role": "tool", "content": text} for text in "12"]
    messages = read_messages([{"role": "developer", "content": "s"}, USER, thought, *answers, *TURNS[1:]])
    tools = read_tools([TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    whole: MaskedTokens = codec.conversation(messages, tools)
    assert trained(codec, whole) == [
        f"<think>\nhm\n</think>\n\nb\n{call}\n{call}<|im_end|>",
        "<think>\n\n</think>\n\nb<|im_end|>",
        "<think>\n\n</think>\n\nd<|im_end|>",
    ]
    [text] = codec.decode([whole.token_ids])
    assert text.startswith("<|im_start|>system\ns\n\n# Tools\n\nYou may call")
    assert (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        in text
    )
    for end in (2, 3, *range(5, len(messages) + 1)):  # what follows changes nothing of what was asked and answered
        assert text.startswith(codec.render_with_tools(messages[:end], tools, add_generation_prompt=False))
