"""The bridge: text that continues a finished turn with later messages, without rendering the past again.

The chat template renders a short conversation with a mark in the place of the finished turn. The rendered text behind
the mark continues the tokens of that turn. The past is not rendered: its tokens stay as engines read and sampled them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from trinity_mq.families.messages import THOUGHTS, Message, Messages
from trinity_mq.families.thoughts import ThoughtFormat

TURN, THOUGHT = "tmq1turn", "tmq2thought"
"""Marks for the text and for the thoughts of the finished turn."""


class Abridged(NamedTuple):
    """Two short conversations: ``ended`` ends with the finished turn, ``continued`` also holds the later messages."""

    ended: list[Message]
    continued: list[Message]


def abridge(messages: Messages, count: int, *, has_thoughts: bool) -> Iterator[Abridged]:
    """Yield the short conversations, the likeliest form first; nothing if the messages do not allow a bridge. If the
    turn has calls, a second form has its mark in a call, because some templates write no text next to calls.

    Args:
        messages: The conversation.
        count: Number of leading messages that the past holds.
        has_thoughts: Whether the past holds thoughts.
    """
    if not 0 < count < len(messages) or messages[count - 1]["role"] != "assistant":
        return
    turn: Message = {"role": "assistant", "content": TURN, **({THOUGHTS: THOUGHT} if has_thoughts else {})}
    calls = messages[count - 1].get("tool_calls") or []
    yield _short(
        turn | ({"tool_calls": [_with_arguments(call, {}) for call in calls]} if calls else {}), messages[count:]
    )
    if calls:
        marked = [*(_with_arguments(call, {}) for call in calls[:-1]), _with_arguments(calls[-1], {"text": TURN})]
        yield _short({**turn, "content": "", "tool_calls": marked}, messages[count:])


def _short(turn: Message, later: Messages) -> Abridged:
    ended: list[Message] = [{"role": "user", "content": "text"}, turn]
    return Abridged(ended, [*ended, *later])


def continuation(
    ended: str, continued: str, thoughts: ThoughtFormat | None, *, has_thoughts: bool
) -> tuple[str, str] | None:
    """Return the texts that the template writes behind the mark: if the turn ends the conversation, and if the later
    messages follow. None: the template would write the past in another form once these messages follow, or does not
    write the mark exactly once.

    Args:
        ended: Text of :attr:`Abridged.ended`.
        continued: Text of :attr:`Abridged.continued`.
        thoughts: Tags around thoughts.
        has_thoughts: Whether the past holds thoughts.
    """
    parts = [text.split(TURN) for text in (ended, continued)]
    if any(len(pieces) != 2 for pieces in parts):
        return None
    (before, after), (before_continued, after_continued) = parts
    if has_thoughts and THOUGHT not in before_continued:
        return None
    if _without_empty(before, thoughts) != _without_empty(before_continued, thoughts):
        return None
    return after, after_continued


def begins_thoughts(text: str, thoughts: ThoughtFormat) -> bool:
    """Return whether ``text`` holds the beginning of thoughts that are not empty."""
    opening, closing = map(re.escape, thoughts)
    return re.search(rf"{opening}\s*(?!{closing})\S", text) is not None


def _without_empty(text: str, thoughts: ThoughtFormat | None) -> str:
    """Return ``text`` without empty thoughts. Whether templates write them depends on the position of a turn."""
    if thoughts is None:
        return text
    return re.sub(rf"{re.escape(thoughts.opening)}\s*{re.escape(thoughts.closing)}\s*", "", text)


def _with_arguments(call: Message, arguments: Message) -> Message:
    return {**call, "function": {**call["function"], "arguments": arguments}}
