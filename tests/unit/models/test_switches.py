"""Switches of chat templates: what each template reads, and what a request for thinking means for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tests import chat_codec
from tests.chat_codec import codec_of, trained
from tests.golden.families.makers import SOURCES, tokenizer_of
from tests.unit.models.conftest import VERSION, engine_server
from trinity_mq.config import Config
from trinity_mq.config.switches import RESERVED, SwitchError, checked_switches
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.families.switches import merge_switch_fields, template_switches, variables_of
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.wrapper import ModelWrapper
from trinity_mq.testing.scripted import ScriptedGenerator, byte_codec

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n"
# the forms in which the makers' templates read their switches
ON_OFF = (
    CHAT
    + OPENS
    + ("{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
)
V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + CHAT
    + OPENS
    + ("{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}")
)
EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}\n" + CHAT + OPENS + "{% endif %}"
)
LEVELS = (
    "{% if enable_thinking is undefined or enable_thinking %}{% set level = reasoning_effort | default('xhigh') %}"
    "{% if level not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no such level') }}{% endif %}"
    "Reasoning: {{ level }}\n{% endif %}" + CHAT + OPENS + "{% endif %}"
)
ALWAYS = CHAT + OPENS + "<think>\n{% endif %}"
NEVER = CHAT + OPENS + "{% endif %}"
USER = [{"role": "user", "content": "Hi"}]


def test_variables_of_a_template() -> None:
    for template, names in ((ON_OFF, {"enable_thinking"}), (V31, {"thinking"}), (EFFORT, {"reasoning_effort"})):
        assert variables_of(template) == names
    assert variables_of(LEVELS) == {"enable_thinking", "reasoning_effort"}, "level is the template's own"
    marked = "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert variables_of(marked + "{% if tools and documents %}{{ strftime_now('%d') }}{% endif %}{{ x }}") == {"x"}
    assert variables_of("{% if %}") == variables_of("{{ " + "(" * 5000) == frozenset(), "rendering reports the error"


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (ON_OFF, {"enable_thinking": False}, {"enable_thinking": False}),
        (ON_OFF, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (ON_OFF, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (ON_OFF, {"reasoning_effort": "high"}, {"enable_thinking": True}),
        (ON_OFF, {"reasoning_effort": "low"}, "cannot limit its thoughts; send none, or medium or more"),
        (ON_OFF, {"enable_thinking": False, "reasoning_effort": "low"}, {"enable_thinking": False}),
        (ON_OFF, {"enable_thinking": True, "reasoning_effort": "none"}, "leave one of them out"),
        (ON_OFF, {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "asks .* twice"),
        (V31, {"enable_thinking": True}, {"thinking": True}),
        (V31, {"chat_template_kwargs": {"thinking": False}}, {"thinking": False}),
        (EFFORT, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (EFFORT, {"reasoning_effort": "xhigh"}, "xhigh; the template of this model knows low, medium, high"),
        (EFFORT, {"reasoning_effort": "none"}, "cannot be switched off: .* the lowest reasoning_effort is low"),
        (EFFORT, {"enable_thinking": True}, {}),
        (LEVELS, {"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (LEVELS, {"reasoning_effort": "high"}, "knows low, medium, xhigh"),
        (LEVELS, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (ALWAYS, {"enable_thinking": True, "reasoning_effort": "medium"}, {}),
        (ALWAYS, {"enable_thinking": False}, "cannot be switched off"),
        (ALWAYS, {"reasoning_effort": "low"}, "cannot limit its thoughts; leave it out"),
        (NEVER, {"enable_thinking": False, "reasoning_effort": "none"}, {}),
        (NEVER, {"reasoning_effort": "low"}, {}),
        (NEVER, {"enable_thinking": True}, "cannot be switched on"),
        (NEVER, {"chat_template_kwargs": {"budget": 3}}, "budget has no effect: .* it reads no switches"),
        (ON_OFF, {"chat_template_kwargs": {"budget": 3}}, "it reads enable_thinking"),
    ],
)
def test_what_a_request_means_for_a_template(template: str, fields: dict[str, Any], expected: Any) -> None:
    codec = codec_of(template)
    if isinstance(expected, str):
        with pytest.raises(SwitchError, match=expected):
            codec.switches(fields)
        return
    switches = codec.switches(fields)
    assert switches == expected
    codec.render_with_tools(USER, switches=switches)  # the template accepts them


ON_OFF_MODELS = {
    "deepseek-v3.1",
    "glm4.5",
    "glm4.6",
    "glm4.7",
    "nemotron-3",
    "qwen3",
    "qwen3.5",
    "qwen3.5-small",
    "qwen3.6",
}
EFFORTS = {"gpt-oss": (("low", "medium", "high"), "medium"), "qwen3.8": (("low", "medium", "xhigh"), "xhigh")}
"""Levels that a template knows, and its default."""
ALWAYS_ON = {"deepseek-r1", "deepseek-r1-distill", "minimax-m2", "ministral-3", "qwen3-thinking-2507"}
"""Models that think or may think, whose templates have no switch."""


@pytest.mark.parametrize("name", SOURCES)
def test_switches_of_the_makers_templates(name: str) -> None:
    tokenizer = tokenizer_of(name)
    codec = TextCodec(tokenizer, frozenset({tokenizer.eos_token_id}))

    def prompt(**fields: Any) -> str:
        return codec.render(USER, switches=codec.switches(fields))

    if name in ON_OFF_MODELS:
        assert prompt(enable_thinking=False) == prompt(reasoning_effort="none") != prompt(enable_thinking=True)
        assert prompt(reasoning_effort="medium") == prompt(enable_thinking=True)
        assert prompt() in {prompt(enable_thinking=False), prompt(enable_thinking=True)}
    elif name in EFFORTS:
        levels, default = EFFORTS[name]
        assert len({prompt(reasoning_effort=level) for level in levels}) == 3
        assert prompt() == prompt(reasoning_effort=default) == prompt(enable_thinking=True)
        with pytest.raises(SwitchError, match=f"knows {', '.join(levels)}"):
            prompt(reasoning_effort="minimal")
    else:
        assert prompt() == prompt(enable_thinking=name in ALWAYS_ON)
        with pytest.raises(SwitchError, match="thinking cannot be switched"):
            prompt(enable_thinking=name not in ALWAYS_ON)


def test_stronger_levels_replace_what_weaker_levels_say_about_thinking() -> None:
    taskset = {"chat_template_kwargs": {"a": 1, "b": 1, "enable_thinking": False}, "temperature": 0.5}
    assert merge_switch_fields(taskset, {"n": 2}) == {"chat_template_kwargs": taskset["chat_template_kwargs"]}
    merged = merge_switch_fields(taskset, {"chat_template_kwargs": {"b": 2}, "reasoning_effort": "high"})
    assert merged == {"chat_template_kwargs": {"a": 1, "b": 2}, "reasoning_effort": "high"}
    assert merge_switch_fields({"reasoning_effort": "low"}, {"enable_thinking": True}) == {
        "chat_template_kwargs": {"enable_thinking": True}
    }
    assert merge_switch_fields({}, {"reasoning_effort": None}) == {}
    assert merge_switch_fields(taskset, {"chat_template_kwargs": [1]}) == {"chat_template_kwargs": [1]}


def test_defaults_of_the_model_apply_to_every_rendering() -> None:
    tokenizer = chat_codec.tokenizer_of(ON_OFF)
    codec = TextCodec(tokenizer, codec_of(ON_OFF).stop_ids, switches={"enable_thinking": False})
    off, on = "assistant\n<think>\n\n</think>\n\n", "assistant\n"
    assert codec.render(USER).endswith(off)
    assert codec.render(USER, switches=codec.switches({})).endswith(off)
    assert codec.render(USER, switches=codec.switches({"reasoning_effort": "medium"})).endswith(on)
    turns = [*USER, {"role": "assistant", "content": "<think>\n\n</think>\n\nyes"}]
    masked = codec.conversation(turns)
    assert trained(codec, masked) == ["yes<|im_end|>"]
    assert codec.fingerprint() != codec_of(ON_OFF).fingerprint() == TextCodec(tokenizer, codec.stop_ids).fingerprint()


@pytest.mark.parametrize(
    ("switches", "problem"),
    [
        ({"messages": []}, "messages is set by the rendering"),
        ({"chat_template": "x"}, "chat_template is set by the rendering"),
        ({"eos_token": "x"}, "eos_token is set by the rendering"),
        ({"a-b": 1}, "wanted the name of a variable"),
        ({"_x": 1}, "wanted the name of a variable"),
        ({"enable_thinking": "false"}, "wanted true or false"),
        ({"reasoning_effort": "huge"}, "wanted one of none, minimal"),
        ({"a": float("nan")}, "not plain JSON"),
        ({"a": {1, 2}}, "not plain JSON"),
        ({"a": "x" * 5000}, "wanted at most 4096"),
        ({f"a{number}": 1 for number in range(33)}, "wanted at most 32"),
    ],
)
def test_refused_switches(switches: dict[str, Any], problem: str) -> None:
    with pytest.raises(SwitchError, match=problem):
        checked_switches(switches)
    fields = {"model": {"tiny": {}, "chat_template_kwargs": switches}}
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"name": "t", "mode": "serve", **fields})


def test_arguments_of_the_template_call_are_reserved() -> None:
    import inspect

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"kwargs"}
    assert arguments <= RESERVED


@given(
    st.dictionaries(
        st.sampled_from(["chat_template_kwargs", "enable_thinking", "reasoning_effort"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(["none", "low", "max"]),
            lambda inner: st.dictionaries(st.sampled_from(["enable_thinking", "thinking", "tools", "x"]), inner),
        ),
    ),
    st.sampled_from([ON_OFF, V31, EFFORT, LEVELS, ALWAYS, NEVER]),
)
def test_hostile_fields_are_refused_or_harmless(fields: dict[str, Any], template: str) -> None:
    try:
        switches = template_switches(merge_switch_fields({"reasoning_effort": "medium"}, fields), template)
    except SwitchError:
        return
    assert switches.keys() <= variables_of(template)


async def test_chats_of_a_workflow_use_the_switches_of_its_taskset() -> None:
    generator = ScriptedGenerator(lambda prompt: "5", codec=byte_codec(ON_OFF))
    off, on = "assistant\n<think>\n\n</think>\n\n", "assistant\n"
    async with engine_server(generator) as server:
        handle = InferenceModel("e0", server.url, "tiny", version=VERSION)
        model = ModelWrapper(handle, rollout_args={"enable_thinking": False}, enable_history=True)
        turns = [*USER, {"role": "assistant", "content": "<think>\n\n</think>\n\n5"}]
        await model.chat_async(USER)
        await model.chat_async(USER, chat_template_kwargs={"enable_thinking": True})
        await model.chat_async(USER, reasoning_effort="medium")
        client = model.get_openai_async_client()
        await client.chat.completions.create(model="", messages=USER)  # type: ignore[arg-type]
        thinking: Any = {"chat_template_kwargs": {"enable_thinking": True}}
        await client.chat.completions.create(model="", messages=USER, extra_body=thinking)  # type: ignore[arg-type]
        await model.generate_async(["2+3="])
        with pytest.raises(EngineRefused, match="chat_template_kwargs"):
            await asyncio.to_thread(model.generate, ["2+3="], chat_template_kwargs={"enable_thinking": True})
        whole = await model.convert_messages_to_experience_async(turns)
        await model.aclose()
    ends = [off if prompt.endswith(off) else on for prompt in generator.prompts[:5]]
    assert ends == [off, on, on, off, on]
    assert generator.prompts[5] == "2+3="
    assert whole.prompt_length == len(byte_codec(ON_OFF).encode(generator.prompts[0])), (
        "the turn begins behind the switch"
    )
