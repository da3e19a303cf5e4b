"""``debug render``: a conversation as tokens, with mask and messages, and its answers as engines read them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_codec import codec_of
from trinity_mq.cli.main import main
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.operations.debug.render import (
    as_json,
    print_rendered,
    read_conversation,
    render_conversation,
)
from trinity_mq.terminal import open_console

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not fast %}<think>\n{% endif %}{% endif %}"
)
PLAIN = TEMPLATE.replace("{% if not fast %}<think>\n{% endif %}", "")
REWRITING = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content + ' (old)' }}"
)
USER, ANSWER = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def rendered(template: str, messages: Any, **fields: Any) -> dict[str, Any]:
    conversation = read_conversation(json.dumps({"messages": messages, **fields}))
    shown = as_json(render_conversation(codec_of(template), conversation))
    assert len(shown["tokens"]) == len(shown["token_texts"]) == len(shown["message_numbers"])
    return shown


def text_of(shown: dict[str, Any], number: int | None) -> str:
    pairs = zip(shown["token_texts"], shown["message_numbers"], strict=True)
    return "".join(text for text, message in pairs if message == number)


def masked(shown: dict[str, Any]) -> str:
    return "".join(text for text, bit in zip(shown["token_texts"], shown["assistant_mask"], strict=True) if bit)


def test_a_prompt_is_shown_with_the_messages_and_the_mask_of_its_tokens() -> None:
    shown = rendered(PLAIN, [USER, ANSWER, USER])
    assert "".join(shown["token_texts"]) == (
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text_of(shown, 1) == "<|im_start|>assistant\n2<|im_end|>\n"
    assert text_of(shown, None) == "<|im_start|>assistant\n", "the opening of the next answer belongs to no message"
    assert masked(shown) == "2<|im_end|>"
    assert shown["rendering"].startswith("chat template")
    assert shown["family"] == "hermes"
    assert not shown["problem"]


def test_each_answer_is_read_as_an_engine_reads_it() -> None:
    call = {"type": "function", "id": "a", "function": {"name": "add", "arguments": "{}"}}
    [turn] = rendered(PLAIN, [USER, {"role": "assistant", "content": "I add.", "tool_calls": [call]}], tools=TOOLS)[
        "turns"
    ]
    assert turn["message"] == 1
    assert turn["content"] == "I add."
    assert turn["malformed_calls"] == 0
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    [turn] = rendered(PLAIN, [USER, {"role": "assistant", "content": "<tool_call>{"}], tools=TOOLS)["turns"]
    assert (turn["content"], turn["malformed_calls"]) == ("<tool_call>{", 1)


def test_a_switch_changes_the_prompt() -> None:
    slow, fast = rendered(TEMPLATE, [USER]), rendered(TEMPLATE, [USER], chat_template_kwargs={"fast": True})
    assert slow["token_texts"] != fast["token_texts"]
    assert not "".join(fast["token_texts"]).endswith("<think>\n")
    conversation = read_conversation(json.dumps([USER]), switches='{"fast": true}')
    assert as_json(render_conversation(codec_of(TEMPLATE), conversation))["tokens"] == fast["tokens"]


def test_a_mask_that_is_unknown_has_a_reason() -> None:
    shown = rendered(REWRITING, [USER, ANSWER, USER, ANSWER])
    assert shown["assistant_mask"] is None
    assert "differently" in shown["problem"]
    assert [turn["text"] for turn in shown["turns"]] == ["2 (old)<|im_end|>", "2<|im_end|>"]
    out = io.StringIO()
    print_rendered(
        open_console(out, width=100),
        render_conversation(codec_of(REWRITING), read_conversation(json.dumps([USER, ANSWER, USER, ANSWER]))),
    )
    assert "no mask" in out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    codec: TextCodec = codec_of(PLAIN)
    codec._tokenizer.save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(codec.stop_ids)}))
    return made


def test_the_command_shows_a_model_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "conversation.json"
    file.write_text(json.dumps({"messages": [USER, ANSWER], "tools": None}))
    assert main(["debug", "render", str(folder), "--conversation", f"@{file}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert masked(shown) == "2<|im_end|>"
    assert shown["turns"][0]["content"] == "2"
    assert main(["debug", "render", str(folder), "--conversation", json.dumps([USER, ANSWER])]) == 0
    text = capsys.readouterr().out
    assert "'<|im_end|>'" in text
    assert "message 1 is written '2<|im_end|>'" in text


def test_the_command_shows_the_model_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = json.dumps([{"role": "user", "content": "1="}])
    words = ["debug", "render", "example:arithmetic", f"run_dir={tmp_path}"]
    assert main([*words, "--conversation", conversation, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"]
    assert not (tmp_path / "model").exists(), "the run's folder is left as it is"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--conversation", "[]"], "has no messages"),
        (["--conversation", "x"], "--conversation is not JSON"),
        (["--conversation", "@nowhere.json"], "cannot be read"),
        (["--conversation", '{"messages": 3}'], "messages is 3, wanted a list"),
        (["--conversation", '[{"role": "user", "content": 3}]'], "messages.0.content is a int"),
        (["--conversation", json.dumps([USER]), "--tools", "{}"], "tools is {}, wanted a list"),
        (["--conversation", json.dumps([USER]), "--switches", "[]"], "switches is [], wanted an object"),
        (["--conversation", json.dumps([USER]), "model.seed=1"], "has no settings"),
        (["--conversation", json.dumps([USER]), "--switches", '{"fast": true}'], "fast"),
        (["--conversation", json.dumps({"messages": [USER], "reasoning_effort": "hi"})], "reasoning_effort"),
    ],
)
def test_wrong_words_are_errors_with_a_next_step(
    folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [word for word in words if word == "model.seed=1"]
    others = [word for word in words if word not in overrides]
    assert main(["debug", "render", str(folder), *overrides, *others]) == 2
    assert problem in capsys.readouterr().err


def test_a_target_without_a_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "render", "nowhere", "--conversation", json.dumps([USER])]) == 2
    assert "give a YAML file or a model's folder" in capsys.readouterr().err
