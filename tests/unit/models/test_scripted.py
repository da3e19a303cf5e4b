"""The scripted model of the test kit: the real server, with what is said decided by a test."""

import pytest

from trinity_mq.models import EngineRefused
from trinity_mq.testing.scripted import logprob, scripted_model

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


async def test_it_streams_calls_of_tools():
    text = 'Voilà <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    async with scripted_model(lambda prompt: text) as model, model.get_openai_async_client() as client:
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, tools=[tool], stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
    assert "".join(piece.delta.content or "" for piece in pieces) == "Voilà"
    assert pieces[-1].finish_reason == "tool_calls"
    assert pieces[-1].delta.tool_calls[0].function.name == "f"
