"""Parses tool calls from a model's text, in the form of the Hermes and Qwen models: ``<tool_call>{"name": ...,
"arguments": {...}}</tool_call>``.

Format: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
from typing import Any

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.messages import Message, Tools
from trinity_mq.thoughts import answer_spans

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""A response with more calls than this is treated as text without calls."""
MAX_CALL_CHARACTERS = 1 << 18


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`."""
    del tools  # JSON gives the types of arguments
    pieces, calls, malformed = _read(text, None)
    return ReadCalls(calls, malformed, pieces if calls else "")


def parse_tool_calls(text: str, prompt_end: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the tool calls in ``text``, and the calls in the form of the API.

    If any call is malformed, the whole text is returned without calls. A call inside thoughts is text. The time is
    linear in the length of the text.

    Args:
        text: The response.
        prompt_end: See :func:`answer_spans`.
    """
    content, calls, _ = _read(text, prompt_end)
    return content, calls


def _read(text: str, prompt_end: str | None) -> tuple[str, list[Message], int]:
    """Return the text before the calls, the calls, and the number of malformed calls."""
    answers = [(start, text[start:end].split(CALL_BEGINS)) for start, end in answer_spans(text, prompt_end)]
    blocks = [block for _, pieces in answers for block in pieces[1:]]
    if not blocks or len(blocks) > MAX_CALLS:
        return text, [], len(blocks)
    calls = [_call(block) for block in blocks]
    valid = [call for call in calls if call is not None]
    if len(valid) < len(calls):
        return text, [], len(calls) - len(valid)
    first = next(start + len(pieces[0]) for start, pieces in answers if len(pieces) > 1)
    return text[:first].rstrip(), valid, 0


def _call(block: str) -> dict[str, Any] | None:
    # a response may end with the call, without the closing tag
    content, _, _ = block.partition(CALL_ENDS)
    if len(content) > MAX_CALL_CHARACTERS:
        return None
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return None
    return api_call(call["name"], arguments)
