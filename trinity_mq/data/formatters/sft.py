"""Answers to imitate: a prompt with its answer, or a conversation with the turns of the assistant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.data.formatters.base import FormatError, Reader
from trinity_mq.experience import Experience


def format_answer(reader: Reader, record: Mapping[str, Any]) -> Experience:
    """Return the experience of a record. The trained tokens are the answer, which is a text or the last message, or all
    turns of the assistant.
    """
    if not reader.has_messages:
        prompt = reader.prompt_messages(record)
        answer = {"role": "assistant", "content": reader.text(record, reader.keys.response_key)}
        return _single(reader, prompt, answer, None)
    messages, tools = reader.messages(record, reader.keys.messages_key), reader.tools(record)
    if reader.keys.enable_concatenated_multi_turn:
        return _turns(reader, messages, tools)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise FormatError(
            f"its messages are of {', '.join(turn['role'] for turn in messages)}; wanted at least two, the last one of "
            "the assistant"
        )
    return _single(reader, messages[:-1], messages[-1], tools)


def _single(
    reader: Reader, prompt: list[dict[str, Any]], answer: dict[str, Any], tools: list[dict[str, Any]] | None
) -> Experience:
    before = reader.prompt_tokens(prompt, tools)
    sampled = reader.answer_tokens(prompt, [answer], tools).token_ids
    return Experience(tokens=[*before, *sampled], prompt_length=len(before))


def _turns(reader: Reader, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Experience:
    if not any(message["role"] == "assistant" for message in messages):
        raise FormatError("no message is from the assistant, so there is nothing to train on")
    whole = reader.codec.conversation(messages, tools)
    trained = [place for place, bit in enumerate(whole.assistant_mask) if bit]
    if not trained or trained[0] == 0:
        raise FormatError("the chat template marks no token after a prompt as the assistant's")
    first, end = trained[0], trained[-1] + 1
    return Experience(
        tokens=whole.token_ids[:end],
        prompt_length=first,
        action_mask=[bool(bit) for bit in whole.assistant_mask[first:end]],
    )
