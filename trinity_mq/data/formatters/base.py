"""The base of formatters: reading the fields of a record, ending an answer, and handling records that are too long."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from trinity_mq.config import RecordFormatConfig
from trinity_mq.engines.generation.text import MaskedTokens, TextCodec
from trinity_mq.experience import Experience
from trinity_mq.experience.fields import short_repr
from trinity_mq.experience.rules import CHOSEN_MASK, DPO, REJECTED_MASK
from trinity_mq.families.messages import (
    Message,
    MessageError,
    read_messages,
    read_tools,
    without_nulls,
)


class FormatError(ValueError):
    """A record cannot be converted into an experience. The message gives the actual and the expected value."""


class Reader:
    """Reads the fields of records, and tokenises them exactly as an engine would have read and sampled them.

    Args:
        keys: The record keys of the fields.
        codec: The model's tokenizer and chat template.

    Raises:
        SwitchError: The chat template cannot follow ``keys.enable_thinking``.
    """

    def __init__(self, keys: RecordFormatConfig, codec: TextCodec) -> None:
        is_other = keys.chat_template or keys.switches
        self.keys, self.codec = keys, codec.rendering_as(keys.chat_template, keys.switches) if is_other else codec

    @property
    def has_messages(self) -> bool:
        """Whether prompts are lists of messages."""
        return self.keys.prompt_type == "messages"

    def text(self, record: Mapping[str, Any], key: str) -> str:
        """Return the text at ``key``.

        Raises:
            FormatError: The value is not a non-empty text.
        """
        value = record.get(key)
        if not isinstance(value, str) or not value:
            raise FormatError(f"holds {short_repr(value)} at {key!r}, wanted a text")
        return value

    def messages(self, record: Mapping[str, Any], key: str) -> list[Message]:
        """Return the messages at ``key``, which may be JSON text.

        Raises:
            FormatError: The value is not a non-empty list of messages.
        """
        value = _parsed(record.get(key), key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise FormatError(f"holds {short_repr(value)} at {key!r}, wanted a list of messages")
        for number, message in enumerate(value):
            if not is_message(message):
                raise FormatError(
                    f"holds {short_repr(message)} at {key}[{number}], wanted a message with role and content"
                )
        return _read(read_messages, record[key], value, key)

    def tools(self, record: Mapping[str, Any]) -> list[Message] | None:
        """Return the offered tools, or None if the record has none.

        Raises:
            FormatError: The value is not a list of functions.
        """
        value = _parsed(record.get(self.keys.tools_key), self.keys.tools_key)
        if not value:
            return None
        if not isinstance(value, list):
            raise FormatError(f"holds {short_repr(value)} at {self.keys.tools_key!r}, wanted a list of tools")
        return _read(read_tools, record[self.keys.tools_key], value, self.keys.tools_key)

    def prompt_messages(self, record: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of a plain-text record as messages: the system prompt, if any, and the user's message.

        Raises:
            FormatError: The prompt is not a non-empty text.
        """
        key = self.keys.system_prompt_key
        system = record.get(key) if key is not None and record.get(key) else self.keys.system_prompt
        user: Message = {"role": "user", "content": self.text(record, self.keys.prompt_key)}
        return [user] if system is None else [{"role": "system", "content": str(system)}, user]

    def prompt_tokens(self, prompt: Sequence[Message], tools: list[Message] | None) -> list[int]:
        """Return the tokens of a prompt as an engine receives it: rendered by the chat template, or unchanged without a
        template.

        Raises:
            TextError: The template rejects the prompt, or the vocabulary does not cover it.
            FormatError: The model has no template, and the prompt is more than one text.
        """
        if self.codec.has_template:
            return self.codec.encode(self.codec.render_with_tools(prompt, tools))
        if len(prompt) > 1 or tools:
            raise FormatError(
                "the model has no chat template, and the prompt is more than one text: leave system prompts, further "
                "messages and tools out, or put a chat_template.jinja into the model's folder"
            )
        return self.codec.encode(_bare_text(prompt[0]), special=True)

    def answer_tokens(
        self, prompt: Sequence[Message], answer: Sequence[Message], tools: list[Message] | None
    ) -> MaskedTokens:
        """Return the tokens of an answer, as an engine would have sampled them after the prompt, including the end of
        sequence. In an answer of several messages the mask excludes all tokens that the assistant did not write.

        Raises:
            TextError: The template rejects the answer or drops a part of it, or the vocabulary does not cover it.
            FormatError: The template renders the prompt differently when an answer follows, or marks no token of
                several messages as the assistant's; or the model has no template and the answer calls tools.
        """
        if len(answer) > 1:
            return self._turns_after(prompt, answer, tools)
        if not self.codec.has_template:
            return _all_trained(self.ended(self.codec.encode(_bare_text(answer[0]))))
        before = self.codec.render_with_tools(prompt, tools)
        whole = self.codec.render_with_tools([*prompt, *answer], tools, add_generation_prompt=False)
        if not whole.startswith(before):
            raise _rewritten(before, whole)
        return _all_trained(self.ended(self.codec.encode(whole[len(before) :])))

    def _turns_after(
        self, prompt: Sequence[Message], answer: Sequence[Message], tools: list[Message] | None
    ) -> MaskedTokens:
        before, whole = self.prompt_tokens(prompt, tools), self.codec.conversation([*prompt, *answer], tools)
        start = len(before)
        if whole.token_ids[:start] != before:
            raise _rewritten(*self.codec.decode([before, whole.token_ids]))
        mask = whole.assistant_mask[start:]
        if 1 not in mask:
            raise FormatError("the chat template marks no token after the prompt as the assistant's")
        end = len(mask) - mask[::-1].index(1)
        return MaskedTokens(whole.token_ids[start : start + end], mask[:end])

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to their first end of sequence, where an engine stops. Append an end of sequence if none
        exists.
        """
        end = next((place for place, token in enumerate(tokens) if token in self.codec.stop_ids), None)
        return [*tokens, self.codec.end_id] if end is None else [*tokens[: end + 1]]


Formatter = Callable[[Reader, Mapping[str, Any]], Experience]
"""Converts a record into an experience.

Raises:
    FormatError: The record cannot be converted.
    TextError: The chat template or the vocabulary rejects it.
"""


def fit_to_length(experience: Experience, max_tokens: int, too_long: Literal["skip", "cut"]) -> Experience | None:
    """Return the experience if it has at most ``max_tokens`` tokens, with its answers cut if ``too_long`` allows it.
    Return None if it does not fit, or if a cut answer would keep no trained token.

    Args:
        experience: The experience of a record.
        max_tokens: Maximum tokens of a prompt and an answer together.
        too_long: Handling of longer experiences. A prompt that leaves no token for the answer never fits.
    """
    room = max_tokens - experience.prompt_length
    longest = experience.response_length
    if experience.experience_type == DPO:
        assert experience.chosen is not None
        assert experience.rejected is not None
        longest = max(len(experience.chosen), len(experience.rejected))
    if longest <= room:
        return experience
    if too_long == "skip" or room < 1:
        return None
    if experience.experience_type == DPO:
        return _cut_pair(experience, room)
    assert experience.action_mask is not None
    mask = experience.action_mask[:room]
    if not mask.any():
        return None
    return Experience(
        tokens=experience.tokens[:max_tokens],
        prompt_length=experience.prompt_length,
        action_mask=mask,
        truncate_status="response_truncated",
        experience_type=experience.experience_type,
    )


def _cut_pair(pair: Experience, room: int) -> Experience | None:
    assert pair.chosen is not None
    assert pair.rejected is not None
    masks = {name: pair.info[name][:room] for name in (CHOSEN_MASK, REJECTED_MASK) if name in pair.info}
    if not all(any(mask) for mask in masks.values()):
        return None
    return Experience(tokens=pair.tokens, chosen=pair.chosen[:room], rejected=pair.rejected[:room], info=masks)


def is_message(value: Any) -> bool:
    """Return whether ``value`` has the keys of a message: a message without content must have calls."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return "content" in value or bool(value.get("tool_calls") or value.get("function_call"))


def _read(
    reader: Callable[[Sequence[Any], str], list[Message]], stored: Any, value: Sequence[Any], key: str
) -> list[Message]:
    try:
        return reader(value if isinstance(stored, str) else without_nulls(value), key)
    except MessageError as error:
        raise FormatError(f"cannot be read as an engine reads it: {error}") from error


def _bare_text(message: Message) -> str:
    if message.get("tool_calls"):
        raise FormatError(
            "the model has no chat template to write tool calls; put a chat_template.jinja into the model's folder"
        )
    return str(message["content"])


def _all_trained(tokens: list[int]) -> MaskedTokens:
    return MaskedTokens(tokens, [1] * len(tokens))


def _rewritten(before: str, whole: str) -> FormatError:
    return FormatError(
        "the chat template writes the prompt differently once an answer follows, so the model would be trained on "
        f"another prompt than it gets in rollouts: {before[-60:]!r} against "
        f"{whole[max(0, len(before) - 60) : len(before)]!r}"
    )


def _parsed(value: Any, key: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"holds {short_repr(value)} at {key!r}, which is not JSON: {error}") from error
