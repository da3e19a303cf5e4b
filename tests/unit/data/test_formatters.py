"""Records as experiences, by a real tokenizer and several chat templates."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.chat_codec import codec_of
from trinity_mq.config import ExperienceBufferConfig, RecordFormatConfig, load_config
from trinity_mq.config.switches import SwitchError
from trinity_mq.data import TasksetError
from trinity_mq.data.formatters import FORMATTERS, FormatError, Reader, find_formatter, fit_to_length
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.experience import Experience, split_dpo_experience_to_single_turn
from trinity_mq.families.messages import read_messages, read_tools
from trinity_mq.runtime.plugins import add_plugins, resolve

CHAT = (
    "{% if tools %}({% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}){% endif %}"
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
MARKED = (
    "{% for message in messages %}[{{ message['role'][0] }}]{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
REWRITES = "{% for message in messages %}{{ messages|length }}{{ message['content'] }}{% endfor %}"
SYSTEM, ASK, SAY = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("assistant", "x"))
)
TOLD = {"role": "tool", "content": "3"}
ADD = {"type": "function", "function": {"name": "add"}}
MESSAGES, Q = {"prompt_type": "messages"}, {"question": "q"}
ReaderOf = Callable[..., Reader]


@functools.cache
def codec(template: str) -> TextCodec:
    return codec_of(template, ["<eos>"], ())


@pytest.fixture(scope="module")
def reader_of() -> ReaderOf:
    return lambda template=CHAT, **keys: Reader(RecordFormatConfig(**keys), codec(template))


def shown(reader: Reader, one: Experience) -> tuple[str, str]:
    """Return the text that is only read and the text that is trained on, other tokens of the response as dots."""
    tokens = one.tokens.tolist()
    assert one.action_mask is not None
    trained = [[token] if bit else [] for token, bit in zip(tokens[one.prompt_length :], one.action_mask, strict=True)]
    prompt = reader.codec.decode([tokens[: one.prompt_length]])[0]
    return prompt, "".join(text or "." for text in reader.codec.decode(trained))


def sft(reader: Reader, record: dict[str, Any]) -> tuple[str, str]:
    return shown(reader, FORMATTERS["sft"](reader, record))


THINKS = (
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_records_may_have_their_own_template_and_no_thoughts(reader_of: ReaderOf) -> None:
    own = reader_of(chat_template="{% for message in messages %}{{ message['content'] }};{% endfor %}")
    assert sft(own, {"question": "1+1=", "answer": "2"}) == ("1+1=;", "2;<eos>")
    assert sft(reader_of(), {"question": "1+1=", "answer": "2"})[0] == "[u]1+1=[a]", (
        "the codec of the model is the same"
    )
    pair = FORMATTERS["dpo"](own, {"question": "q", "chosen": "a", "rejected": "b"})
    assert own.codec.decode([pair.tokens.tolist()]) == ["q;"]
    silent = reader_of(template=THINKS, enable_thinking=False)
    assert silent.codec.decode([silent.prompt_tokens([ASK], None)]) == ["[u]q[a]<think></think>"]
    assert codec(THINKS).render([ASK]) == "[u]q[a]"
    with pytest.raises(SwitchError, match="cannot be switched on"):
        reader_of(enable_thinking=True)


def test_plain_text_goes_through_the_chat_template_and_ends_as_an_engine_would(reader_of: ReaderOf) -> None:
    reader = reader_of(system_prompt="be kind")
    assert sft(reader, {"question": "1+1=", "answer": "2"}) == ("[s]be kind[u]1+1=[a]", "2<eos>")
    assert sft(reader_of(template=""), {"question": "1+1=", "answer": "2"}) == ("1+1=", "2<eos>")
    own = reader_of(system_prompt="be kind", system_prompt_key="rule")
    assert sft(own, {"question": "q", "answer": "a", "rule": "r"})[0] == "[s]r[u]q[a]"
    assert sft(own, {"question": "q", "answer": "a"})[0] == "[s]be kind[u]q[a]"


def test_the_last_message_alone_is_trained_on_or_every_turn(reader_of: ReaderOf) -> None:
    record = {"messages": [SYSTEM, ASK, SAY, {"role": "user", "content": "r"}, {"role": "assistant", "content": "yz"}]}
    last = reader_of(prompt_type="messages")
    assert sft(last, record) == ("[s]s[u]q[a]x<eos>\n[u]r[a]", "yz<eos>")
    for template in (CHAT, MARKED):
        every = reader_of(template, prompt_type="messages", enable_concatenated_multi_turn=True)
        prompt, trained = sft(every, record)
        assert prompt == "[s]s[u]q[a]"
        assert trained.startswith("x<eos>")
        assert trained.replace("\n", "").replace(".", "") == "x<eos>yz<eos>"


def test_a_pair_shares_its_prompt(reader_of: ReaderOf) -> None:
    for keys, record in (
        ({"prompt_key": "p"}, {"p": "q", "chosen": "a", "rejected": "b"}),
        (MESSAGES, {"messages": [ASK], "chosen": "a", "rejected": "b"}),
        (
            MESSAGES,
            {"messages": [ASK], "chosen": [ASK, {**SAY, "content": "a"}], "rejected": [{**SAY, "content": "b"}]},
        ),
    ):
        reader = reader_of(**keys)
        pair = FORMATTERS["dpo"](reader, record)
        assert pair.chosen is not None
        assert pair.rejected is not None
        texts = reader.codec.decode([pair.tokens.tolist(), pair.chosen.tolist(), pair.rejected.tolist()])
        assert texts == ["[u]q[a]", "a<eos>", "b<eos>"]
    data = ExperienceBufferConfig(storage_type="file", path="x", schema_type="dpo")
    keys = {"prompt_key": "question", "chosen_key": "chosen", "rejected_key": "rejected"}
    assert data.required_keys == keys


@pytest.mark.parametrize(
    ("schema", "keys", "record", "said"),
    [
        ("sft", {}, {"question": "q", "answer": ""}, "holds '' at 'answer', wanted a text"),
        ("sft", {}, {"question": 3, "answer": "a"}, "holds 3 at 'question'"),
        ("sft", MESSAGES, {"messages": "[{"}, "which is not JSON"),
        ("sft", MESSAGES, {"messages": []}, "wanted a list of messages"),
        ("sft", MESSAGES, {"messages": [ASK, "x"]}, r"messages\[1\], wanted a message with role"),
        ("sft", MESSAGES, {"messages": [SAY, ASK]}, "of assistant, user; wanted at least two"),
        ("sft", MESSAGES, {"messages": [ASK, SAY], "tools": {"a": 1}}, "wanted a list of tools"),
        ("sft", MESSAGES, {"messages": [ASK, SAY], "tools": [{"name": "f"}]}, "wanted 'function'"),
        ("sft", MESSAGES, {"messages": [ASK, {"role": "assistant"}]}, "wanted a message with role"),
        ("sft", MESSAGES, {"messages": [ASK, {**SAY, "content": 3}]}, "messages.1.content is a int"),
        ("sft", {**MESSAGES, "enable_concatenated_multi_turn": True}, {"messages": [ASK]}, "nothing to train on"),
        ("dpo", {}, {**Q, "chosen": "a", "rejected": "a"}, "the same tokens"),
        ("dpo", {}, {**Q, "chosen": [ASK], "rejected": "a"}, "wanted an answer of the assistant"),
        ("dpo", {}, {**Q, "chosen": [SAY, TOLD], "rejected": "a"}, "wanted an answer of the assistant"),
        ("cpt", {}, {"question": None}, "wanted a text"),
    ],
)
def test_a_record_that_does_not_fit_says_what_is_wrong(
    reader_of: ReaderOf, schema: str, keys: dict[str, Any], record: dict[str, Any], said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        FORMATTERS[schema](reader_of(**keys), record)


def test_a_template_that_is_absent_or_rewrites_the_prompt_is_refused(reader_of: ReaderOf) -> None:
    with pytest.raises(FormatError, match="no chat template"):
        sft(reader_of(template="", system_prompt="s"), {**Q, "answer": "a"})
    with pytest.raises(FormatError, match="writes the prompt differently once an answer follows"):
        sft(reader_of(REWRITES), {**Q, "answer": "a"})
    every = reader_of(REWRITES, **MESSAGES, enable_concatenated_multi_turn=True)
    with pytest.raises(TextError, match="differently once another message follows"):
        sft(every, {"messages": [ASK, SAY, ASK, SAY]})


def test_what_is_too_long_is_left_out_or_cut(reader_of: ReaderOf) -> None:
    reader = reader_of(template="")
    one = FORMATTERS["sft"](reader, {"question": "abcd", "answer": "123"})
    assert fit_to_length(one, 8, "skip") is one
    assert fit_to_length(one, 7, "skip") is None
    cut = fit_to_length(one, 6, "cut")
    assert cut is not None
    assert shown(reader, cut) == ("abcd", "12")
    assert cut.truncate_status == "response_truncated"
    assert fit_to_length(one, 4, "cut") is None
    masked = Experience(tokens=[1, 2, 3, 4], prompt_length=1, action_mask=[False, False, True])
    assert fit_to_length(masked, 3, "cut") is None, "nothing that is trained on is left"
    pair = FORMATTERS["dpo"](reader, {"question": "ab", "chosen": "1", "rejected": "234"})
    assert fit_to_length(pair, 5, "skip") is None
    shorter = fit_to_length(pair, 5, "cut")
    assert shorter is not None
    assert [len(part) for part in (shorter.chosen, shorter.rejected) if part is not None] == [2, 3]


CALLS = (
    "{% for tool in tools or [] %}({{ tool.function | tojson }}){% endfor %}"
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
STORED_CALL = {"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
STORED = {"name": None, "tool_calls": None, "tool_call_id": None}
"""The keys that Arrow gives every message of a column."""
SENT_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SENT = [ASK, {"role": "assistant", "content": None, "tool_calls": [SENT_CALL]}, TOLD, SAY]
ARROW = [{**STORED, **message, "tool_calls": [STORED_CALL] if "tool_calls" in message else None} for message in SENT]
ARROW_TOOL = {"type": "function", "function": {"name": "add", "parameters": None}}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [(SENT, [ADD]), (json.dumps(SENT), json.dumps([ADD])), (ARROW, [ARROW_TOOL])],
    ids=["as sent", "as text", "as Arrow gives them"],
)
def test_answers_and_pairs_are_read_as_an_engine_reads_the_request(
    reader_of: ReaderOf, messages: Any, tools: Any
) -> None:
    last, every = (
        reader_of(CALLS, prompt_type="messages", enable_concatenated_multi_turn=several) for several in (False, True)
    )
    asked = last.codec.render_with_tools(read_messages(SENT[:-1]), read_tools([ADD]))
    assert asked == '({"name": "add"})[u]q[a]!add{"a": 1}<eos>[t]3[a]'
    assert sft(last, {"messages": messages, "tools": tools}) == (asked, "x<eos>")
    prompt, trained = sft(every, {"messages": messages, "tools": tools})
    assert (prompt, trained.replace(".", "")) == ('({"name": "add"})[u]q[a]', '!add{"a": 1}<eos>x<eos>')
    pair = FORMATTERS["dpo"](last, {"messages": [ASK], "tools": tools, "chosen": messages, "rejected": "n"})
    assert pair.chosen is not None
    assert last.codec.decode([[*pair.tokens.tolist(), *pair.chosen.tolist()]]) == [asked + "x<eos>"]


def test_of_an_answer_of_several_turns_only_what_the_assistant_wrote_counts(reader_of: ReaderOf) -> None:
    reader = reader_of(CALLS, prompt_type="messages")
    record = {"messages": [ASK], "tools": [ADD], "chosen": SENT[1:], "rejected": [*SENT[1:3], {**SAY, "content": "y"}]}
    pair = FORMATTERS["dpo"](reader, record)
    halves = split_dpo_experience_to_single_turn([pair])
    assert [shown(reader, half)[1] for half in halves] == [f'!add{{"a": 1}}<eos>.......{text}<eos>' for text in "xy"], (
        "the text of the tool and the head of the next turn are read, not preferred"
    )
    cut = fit_to_length(pair, len(pair.tokens) + 3, "cut")
    assert cut is not None
    assert shown(reader, split_dpo_experience_to_single_turn([cut])[0])[1] == "!ad"
    single = FORMATTERS["dpo"](reader, {"messages": [ASK], "chosen": "a", "rejected": "b"})
    assert single.info == {}


def test_an_answer_ends_with_its_first_end_and_a_text_with_its_last(reader_of: ReaderOf) -> None:
    reader = reader_of()
    assert sft(reader, {"question": "q", "answer": "a<eos>b"})[1] == "a<eos>"
    assert shown(reader, FORMATTERS["cpt"](reader, {"question": "ab<eos>cd"})) == ("a", "b<eos>cd<eos>")
    assert shown(reader, FORMATTERS["cpt"](reader, {"question": "ab<eos>"})) == ("a", "b<eos>")


LIKE_JSON = ("[1, 2, 3]", "[a](b)", "[]", "[{", "null", '["a"]', '[{"a": 1}]', "[" * 5000, '[{"role": "user"}]')


@pytest.mark.parametrize(
    "answer", [*LIKE_JSON, '{"role": "user", "content": "x"}', '[{"role": "user", "content": "x"}, 3]']
)
def test_an_answer_that_looks_like_json_is_a_text(reader_of: ReaderOf, answer: str) -> None:
    for keys, record in (({}, Q), (MESSAGES, {"messages": [ASK]})):
        pair = FORMATTERS["dpo"](reader_of(**keys), {**record, "chosen": answer, "rejected": "b"})
        assert pair.chosen is not None
        assert codec(CHAT).decode([pair.chosen.tolist()]) == [f"{answer}<eos>"]


def test_what_the_template_does_not_write_is_left_out_as_a_record(reader_of: ReaderOf) -> None:
    reader = reader_of(prompt_type="messages")
    call = {**SAY, "tool_calls": [SENT_CALL]}
    pair = {"messages": [ASK], "chosen": [call], "rejected": "n"}
    for schema, record in (
        ("sft", {"messages": [ASK, call]}),
        ("sft", {"messages": [ASK, call, TOLD, SAY]}),
        ("dpo", pair),
    ):
        with pytest.raises(TextError, match="does not write tool calls"):
            FORMATTERS[schema](reader, record)
    with pytest.raises(FormatError, match="no chat template to write tool calls"):
        FORMATTERS["dpo"](reader_of("", prompt_type="messages"), pair)
    with pytest.raises(TextError, match="does not write tools"):
        sft(reader_of(MARKED, prompt_type="messages"), {"messages": [ASK, SAY], "tools": [ADD]})


CLASS_FORM = """
import torch
from transformers import AutoTokenizer

from trinity_mq.data.formatters import FORMATTER, ExperienceFormatter, PromptType
from trinity_mq.experience import Experience


@FORMATTER.register_module("shout")
class Shout(ExperienceFormatter):
    def __init__(self, tokenizer_path, format_config):
        assert format_config.prompt_type == PromptType.PLAINTEXT
        assert format_config.image_key is None
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.keys = format_config

    def format(self, sample):
        prompt = self.tokenizer(sample[self.keys.prompt_key], return_tensors="pt")["input_ids"][0]
        answer = self.tokenizer(sample[self.keys.response_key].upper(), return_tensors="pt")["input_ids"][0]
        return Experience(tokens=torch.cat([prompt, answer]), prompt_length=len(prompt))
"""


@pytest.fixture
def shout(tmp_path: Path, fresh_imports: None) -> tuple[TextCodec, Path]:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "formatter_class_plugin.py").write_text(CLASS_FORM)
    add_plugins([str(tmp_path / "plugins")])
    codec_of(CHAT)._tokenizer.save_pretrained(tmp_path / "model")
    return TextCodec.load(tmp_path / "model"), tmp_path / "plugins"


def test_a_formatter_in_class_form_makes_what_a_direct_call_makes(shout: tuple[TextCodec, Path]) -> None:
    saved, folder = shout
    data: dict[str, Any] = {"storage_type": "file", "path": "x", "schema_type": "shout", "format": {"prompt_key": "q"}}
    settings: dict[str, Any] = {"plugin_dirs": [str(folder)], "mode": "train", "model": {"model_path": "m"}}
    config = load_config(
        {**settings, "algorithm": {"algorithm_type": "sft"}, "buffer": {"trainer_input": {"experience_buffer": data}}}
    )
    source = config.buffer.trainer_input.experience_buffer
    assert (source.schema_type, source.required_keys) == ("formatter_class_plugin.Shout", {})
    experience = find_formatter(source, saved)(Reader(source.format, saved), {"q": "one", "answer": "two"})
    kind = resolve("formatter", "formatter_class_plugin.Shout")
    keys = SimpleNamespace(prompt_type="plaintext", prompt_key="q", response_key="answer", image_key=None)
    direct = kind(tokenizer_path=saved.path, format_config=keys).format({"q": "one", "answer": "two"})
    assert experience.tokens.tolist() == direct.tokens.tolist()
    assert shown(Reader(source.format, saved), experience) == ("one", "TWO")


def test_a_record_that_a_class_cannot_format_is_left_out(shout: tuple[TextCodec, Path]) -> None:
    saved, _ = shout
    source = ExperienceBufferConfig(storage_type="file", path="x", schema_type="formatter_class_plugin.Shout")
    formatter = find_formatter(source, saved)
    with pytest.raises(FormatError, match=r"cannot be formatted by formatter_class_plugin.Shout: KeyError: 'question'"):
        formatter(Reader(source.format, saved), {"q": "one"})
    with pytest.raises(TasksetError, match=r"schema_type formatter_class_plugin.Shout cannot be made of a tokenizer"):
        find_formatter(source.model_copy(update={"format": RecordFormatConfig(prompt_type="messages")}), saved)
    with pytest.raises(ValidationError, match=r"unknown schema_type 'shuot'; wanted experience, sft, dpo, cpt or the"):
        ExperienceBufferConfig(storage_type="file", path="x", schema_type="shuot")
