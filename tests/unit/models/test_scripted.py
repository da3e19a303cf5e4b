"""The scripted model of the test kit: the real server, with what is said decided by a test."""

import pytest

from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.models import EngineRefused
from trinity_mq.testing.scripted import ScriptedGenerator, byte_codec, logprob, scripted_model, written_answer

MESSAGES = [{"role": "user", "content": "Qu'est-ce que c'est ? 😀"}]


async def test_it_says_its_script_in_order_and_is_recorded():
    async with scripted_model(["un é", "deux €", "trois. quatre"], version=(2, 3)) as model:
        said = await model.chat_async(MESSAGES, n=2)
        [third] = await model.chat_async(MESSAGES, stop=".")
        assert [e.response_text for e in [*said, third]] == ["un é", "deux €", "trois"]
        assert third.logprobs.tolist() == [logprob(place) for place in range(14)], "of all that was sampled"
        assert third.versions == [(0, 2, 3)]
        assert model.extract_experience_from_history() == [*said, third]
        with pytest.raises(EngineRefused, match="the script has nothing left to say"):
            await model.chat_async(MESSAGES)


async def test_a_model_and_its_clients_have_the_names_of_trinity_rft():
    async with scripted_model(["one", "two"], version=(2, 3), temperature=0.5) as model:
        client, other = model.get_openai_async_client(), model.get_openai_client()
        assert client.model_path == other.model_path == model.model_name
        completion = await client.chat.completions.create(model=client.model_path, messages=MESSAGES)
        assert completion.choices[0].message.content == "one"
        assert await model.model_version_async == model.model_version == (2, 3)
        assert model.generate_kwargs == {"temperature": 0.5, "top_p": 1.0}
        lengths = [await model.get_message_token_len(MESSAGES * number) for number in (1, 2)]
        [answer] = await model.chat_async(MESSAGES)
        opening = len(b"<|im_start|>assistant\n") - len(b"<|im_start|>") + 1
        assert lengths[0] == answer.prompt_length - opening
        assert lengths[1] == 2 * lengths[0]


async def test_it_streams_calls_of_tools():
    text = 'Voilà <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    async with scripted_model(lambda prompt: text) as model, model.get_openai_async_client() as client:
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, tools=[tool], stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
    assert "".join(piece.delta.content or "" for piece in pieces) == "Voilà"
    assert pieces[-1].finish_reason == "tool_calls"
    assert pieces[-1].delta.tool_calls[0].function.name == "f"


CALLS = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WRITES_CALLS = """
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>
{%- endfor %}"""
OPENS_THOUGHTS = (
    """
{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == "assistant" %}<think>{{ m.reasoning_content or "" }}</think>{% endif %}{{ m.content }}"""
    + WRITES_CALLS
    + """<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<think>{% endif %}"""
)
ENDS_WITH_A_ROLE = (
    """
{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"""
    + WRITES_CALLS
    + """{% endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}<|assistant|>{% endif %}{# <|user|><|tool|> #}"""
)


@pytest.mark.parametrize(
    ("template", "ends", "message", "prompt", "text"),
    [
        pytest.param(OPENS_THOUGHTS, ("<|im_end|>",), {"content": "Hi"}, "<|im_start|>assistant<think>",
                     "</think>Hi<|im_end|>", id="the prompt has opened thoughts"),
        pytest.param(ENDS_WITH_A_ROLE, ("<|user|>", "<|tool|>"), {"content": "Hi", "reasoning_content": "So"},
                     "<|user|>x<|assistant|>", "<think>So</think>Hi<|user|>", id="the next user ends it"),
        pytest.param(ENDS_WITH_A_ROLE, ("<|user|>", "<|tool|>"), {"tool_calls": CALLS}, "<|tool|>5",
                     '<call>add({"a": 2})</call><|tool|>', id="no turn is opened after a tool, and a tool ends it"),
    ],
)  # fmt: skip
def test_a_message_is_written_as_its_template_writes_it(template, ends, message, prompt, text):
    assert written_answer(byte_codec(template, ends=ends), message, prompt) == text


def test_a_message_that_cannot_follow_the_prompt_is_refused():
    template = OPENS_THOUGHTS.replace("assistant<think>{% endif", "assistant<think></think>{% endif")
    with pytest.raises(ValueError, match=r"opens the turn with .*, but writes the message as .*So"):
        written_answer(byte_codec(template), {"content": "Hi", "reasoning_content": "So"}, "<think></think>")


async def test_messages_are_answered_in_the_tokens_of_a_family():
    codec = byte_codec(OPENS_THOUGHTS, specials=("<other>",))
    script = [{"reasoning_content": "So", "tool_calls": CALLS}, "</think>5<other>"]
    async with scripted_model(script, codec=codec) as model:
        [first] = await model.chat_async(MESSAGES, tools=[ADD])
        [second] = await model.chat_async(MESSAGES)
    tokens = first.tokens[first.prompt_length :].tolist()
    assert codec.decode([tokens]) == ['So</think><call>add({"a": 2})</call><|im_end|>']
    assert tokens[-1] in codec.stop_ids
    assert len(tokens) < len(first.response_text), "special tokens are tokens, not bytes"
    assert second.tokens.tolist()[-2:] == [*codec.encode("<other>"), codec.end_id]


def test_an_end_in_the_text_is_the_only_end():
    codec = byte_codec(ENDS_WITH_A_ROLE, ends=("<|user|>", "<|tool|>"))
    generator = ScriptedGenerator([{"tool_calls": CALLS}, "Hi<|user|>", "Hi"], codec=codec)
    request = GenerationRequest(codec.encode("x"), max_tokens=64)
    answers = [generator.generate([request])[0][0] for _ in range(3)]
    assert [answer.text for answer in answers] == ['<call>add({"a": 2})</call>', "Hi", "Hi"]
    assert answers[1].token_ids == answers[2].token_ids == codec.encode("Hi<|user|>")
    assert generator.vocabulary == codec.size > max(codec.stop_ids) > 255
