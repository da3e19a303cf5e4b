"""Pairs of a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trinity_mq.data.formatters.base import FormatError, Reader, is_message
from trinity_mq.experience import Experience
from trinity_mq.experience.rules import CHOSEN_MASK, REJECTED_MASK
from trinity_mq.families.messages import Message


def format_pair(reader: Reader, record: Mapping[str, Any]) -> Experience:
    """Return the experience of a record, of type ``dpo``: the prompt and both answers. In an answer of several messages
    only the assistant's tokens count.
    """
    if reader.has_messages:
        prompt, tools = reader.messages(record, reader.keys.messages_key), reader.tools(record)
    else:
        prompt, tools = reader.prompt_messages(record), None
    chosen, rejected = (
        reader.answer_tokens(prompt, _answer(reader, record, key, prompt), tools)
        for key in (reader.keys.chosen_key, reader.keys.rejected_key)
    )
    if chosen.token_ids == rejected.token_ids:
        raise FormatError("its chosen and its rejected answer are the same tokens, so that nothing is preferred")
    masks = {CHOSEN_MASK: chosen.assistant_mask, REJECTED_MASK: rejected.assistant_mask}
    return Experience(
        tokens=reader.prompt_tokens(prompt, tools),
        chosen=chosen.token_ids,
        rejected=rejected.token_ids,
        info={name: list(map(bool, mask)) for name, mask in masks.items() if not all(mask)},
    )


def _answer(reader: Reader, record: Mapping[str, Any], key: str, prompt: list[Message]) -> list[Message]:
    """Return the answer at ``key`` as messages. Stored messages may begin with the prompt, which is removed."""
    value = record.get(key)
    if isinstance(value, str) and not (reader.has_messages and _holds_messages(value)):
        return [{"role": "assistant", "content": reader.text(record, key)}]
    messages = reader.messages(record, key) if value else []
    answer = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    speakers = [message["role"] for message in answer]
    if not answer or "user" in speakers or {speakers[0], speakers[-1]} != {"assistant"}:
        roles = ", ".join(message["role"] for message in messages) or "nobody"
        raise FormatError(f"the messages at {key!r} are of {roles}; wanted an answer of the assistant")
    return answer


def _holds_messages(text: str) -> bool:
    """Return whether a text is JSON of messages. Any other text is an answer, even if it looks similar."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(map(is_message, value))
