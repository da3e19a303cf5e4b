"""Pairs of a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.data.formatters.base import FormatError, Message, Reader
from trinity_mq.experience import Experience


def pair_of(reader: Reader, record: Mapping[str, Any]) -> Experience:
    """Return the experience of a record, of type ``dpo``: the prompt, and both answers to it."""
    if reader.has_messages:
        prompt, tools = reader.messages(record, reader.keys.messages_key), reader.tools(record)
    else:
        prompt, tools = reader.prompt_messages(record), None
    chosen, rejected = (
        reader.answer_tokens(prompt, _answer(reader, record, key, prompt), tools)
        for key in (reader.keys.chosen_key, reader.keys.rejected_key)
    )
    if chosen == rejected:
        raise FormatError("its chosen and its rejected answer are the same tokens, so that nothing is preferred")
    return Experience(tokens=reader.prompt_tokens(prompt, tools), chosen=chosen, rejected=rejected)


def _answer(reader: Reader, record: Mapping[str, Any], key: str, prompt: list[Message]) -> list[Message]:
    """Return an answer, a text or messages; those may repeat the prompt."""
    value = record.get(key)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [{"role": "assistant", "content": reader.text(record, key)}]
    messages = reader.messages(record, key) if value else []
    own = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not own or any(one["role"] == "user" for one in own):
        roles = ", ".join(one["role"] for one in messages) or "nobody"
        raise FormatError(f"the messages at {key!r} are of {roles}; wanted an answer of the assistant")
    return own
