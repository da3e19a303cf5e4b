"""Records as experiences, by a real tokenizer and several chat templates."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Callable
from typing import Any

import pytest

from trinity_mq.config import ExperienceBufferConfig, ModelConfig, RecordFormatConfig, TinyModelConfig
from trinity_mq.data.formatters import FORMATTERS, FormatError, Reader, fitted
from trinity_mq.experience import Experience
from trinity_mq.models import ensure_model_folder
from trinity_mq.models.engines.generation.text import TextCodec, TextError

CHAT = (
    "{% if tools %}({% for tool in tools %}{{ tool['name'] }}{% endfor %}){% endif %}"
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
ReaderOf = Callable[..., Reader]


@pytest.fixture(scope="module")
def reader_of(tmp_path_factory: pytest.TempPathFactory) -> ReaderOf:
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def codec(template: str) -> TextCodec:
        characters = string.ascii_letters + string.digits + "[]()+=? \n"
        tiny = TinyModelConfig(characters=characters, chat_template=template, hidden_size=8, intermediate_size=8)
        return TextCodec.load(ensure_model_folder(ModelConfig(tiny=tiny), folder / str(abs(hash(template))), 0))

    def make(template: str = CHAT, **keys: Any) -> Reader:
        return Reader(RecordFormatConfig(**keys), codec(template))

    return make


def shown(reader: Reader, one: Experience) -> tuple[str, str]:
    """Return the text that is only read and the text that is trained on, other tokens of the response as dots."""
    tokens = one.tokens.tolist()
    assert one.action_mask is not None
    trained = [[token] if bit else [] for token, bit in zip(tokens[one.prompt_length :], one.action_mask, strict=True)]
    prompt = reader.codec.decode([tokens[: one.prompt_length]])[0]
    return prompt, "".join(text or "." for text in reader.codec.decode(trained))


def sft(reader: Reader, record: dict[str, Any]) -> tuple[str, str]:
    return shown(reader, FORMATTERS["sft"](reader, record))


def test_plain_text_goes_through_the_chat_template_and_ends_as_an_engine_would(reader_of: ReaderOf) -> None:
    reader = reader_of(system_prompt="be kind")
    assert sft(reader, {"question": "1+1=", "answer": "2"}) == ("[s]be kind[u]1+1=[a]", "2<eos>")
    own = reader_of(system_prompt="be kind", system_prompt_key="rule")
    assert sft(own, {"question": "q", "answer": "a", "rule": "r"})[0] == "[s]r[u]q[a]"
    assert sft(own, {"question": "q", "answer": "a"})[0] == "[s]be kind[u]q[a]"


def test_without_a_template_the_answer_follows_the_prompt(reader_of: ReaderOf) -> None:
    assert sft(reader_of(template=""), {"question": "1+1=", "answer": "2"}) == ("1+1=", "2<eos>")
    with pytest.raises(FormatError, match="no chat template"):
        sft(reader_of(template="", system_prompt="s"), {"question": "q", "answer": "a"})


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


def test_messages_and_tools_may_be_json_text_and_nulls_are_left_out(reader_of: ReaderOf) -> None:
    reader = reader_of(prompt_type="messages")
    record = {"messages": json.dumps([{**ASK, "name": None}, SAY]), "tools": json.dumps([{"name": "add"}])}
    assert sft(reader, record) == ("(add)[u]q[a]", "x<eos>")


def test_a_pair_shares_its_prompt(reader_of: ReaderOf) -> None:
    for keys, record in (
        ({"prompt_key": "p"}, {"p": "q", "chosen": "a", "rejected": "b"}),
        ({"prompt_type": "messages"}, {"messages": [ASK], "chosen": "a", "rejected": "b"}),
        (
            {"prompt_type": "messages"},
            {
                "messages": [ASK],
                "chosen": [ASK, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": "b"}],
            },
        ),
    ):
        reader = reader_of(**keys)
        pair = FORMATTERS["dpo"](reader, record)
        assert (pair.experience_type, pair.chosen is None, pair.rejected is None) == ("dpo", False, False)
        assert pair.chosen is not None
        assert pair.rejected is not None
        texts = reader.codec.decode([pair.tokens.tolist(), pair.chosen.tolist(), pair.rejected.tolist()])
        assert texts == ["[u]q[a]", "a<eos>", "b<eos>"]


def test_of_a_text_every_token_but_the_first_is_trained_on(reader_of: ReaderOf) -> None:
    reader = reader_of()
    assert shown(reader, FORMATTERS["cpt"](reader, {"question": "abc"})) == ("a", "bc<eos>")


@pytest.mark.parametrize(
    ("schema", "keys", "record", "said"),
    [
        ("sft", {}, {"question": "q", "answer": ""}, "holds '' at 'answer', wanted a text"),
        ("sft", {}, {"question": 3, "answer": "a"}, "holds 3 at 'question'"),
        ("sft", {"prompt_type": "messages"}, {"messages": "[{"}, "which is not JSON"),
        ("sft", {"prompt_type": "messages"}, {"messages": []}, "wanted a list of messages"),
        ("sft", {"prompt_type": "messages"}, {"messages": [ASK, "x"]}, r"messages\[1\], wanted a message with role"),
        ("sft", {"prompt_type": "messages"}, {"messages": [SAY, ASK]}, "of assistant, user; wanted at least two"),
        ("sft", {"prompt_type": "messages"}, {"messages": [ASK, SAY], "tools": {"a": 1}}, "wanted a list of tools"),
        (
            "sft",
            {"prompt_type": "messages", "enable_concatenated_multi_turn": True},
            {"messages": [ASK]},
            "nothing to imitate",
        ),
        ("dpo", {}, {"question": "q", "chosen": "a", "rejected": "a"}, "the same tokens"),
        ("dpo", {}, {"question": "q", "chosen": [ASK], "rejected": "a"}, "wanted an answer of the assistant"),
        ("cpt", {}, {"question": None}, "wanted a text"),
    ],
)
def test_a_record_that_does_not_fit_says_what_is_wrong(
    reader_of: ReaderOf, schema: str, keys: dict[str, Any], record: dict[str, Any], said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        FORMATTERS[schema](reader_of(**keys), record)


def test_a_template_that_rewrites_the_prompt_is_refused(reader_of: ReaderOf) -> None:
    with pytest.raises(FormatError, match="writes the prompt differently once an answer follows"):
        sft(reader_of(REWRITES), {"question": "q", "answer": "a"})
    every = reader_of(REWRITES, prompt_type="messages", enable_concatenated_multi_turn=True)
    with pytest.raises(TextError, match="differently once more follows"):
        sft(every, {"messages": [ASK, SAY, ASK, SAY]})


def test_what_is_too_long_is_left_out_or_cut(reader_of: ReaderOf) -> None:
    reader = reader_of(template="")
    one = FORMATTERS["sft"](reader, {"question": "abcd", "answer": "123"})
    assert fitted(one, 8, "skip") is one
    assert fitted(one, 7, "skip") is None
    cut = fitted(one, 6, "cut")
    assert cut is not None
    assert shown(reader, cut) == ("abcd", "12")
    assert cut.truncate_status == "response_truncated"
    assert fitted(one, 4, "cut") is None
    pair = FORMATTERS["dpo"](reader, {"question": "ab", "chosen": "1", "rejected": "234"})
    assert fitted(pair, 5, "skip") is None
    shorter = fitted(pair, 5, "cut")
    assert shorter is not None
    assert [len(part) for part in (shorter.chosen, shorter.rejected) if part is not None] == [2, 3]


def test_a_conversation_that_is_cut_before_the_first_trained_token_is_left_out(reader_of: ReaderOf) -> None:
    one = Experience(tokens=[1, 2, 3, 4], prompt_length=1, action_mask=[False, False, True])
    assert fitted(one, 3, "cut") is None


def test_the_keys_that_every_record_must_have_follow_from_the_format() -> None:
    def keys(schema: Any, **given: Any) -> dict[str, str]:
        form = RecordFormatConfig(**given)
        return ExperienceBufferConfig(storage_type="file", path="x", schema_type=schema, format=form).required_keys

    assert keys("sft") == {"prompt_key": "question", "response_key": "answer"}
    assert keys("sft", prompt_type="messages") == {"messages_key": "messages"}
    assert keys("dpo") == {"prompt_key": "question", "chosen_key": "chosen", "rejected_key": "rejected"}
    assert keys("cpt", prompt_key="text") == {"prompt_key": "text"}
