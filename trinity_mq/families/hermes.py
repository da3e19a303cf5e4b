"""Parses tool calls from a model's text, in the form of the Hermes and Qwen models: ``<tool_call>{"name": ...,
"arguments": {...}}</tool_call>``.

Format: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from trinity_mq.families.family import ParsedAnswer
from trinity_mq.families.messages import Tools
from trinity_mq.messages.msgpack_scan import repair_surrogates
from trinity_mq.thoughts import answer_spans

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""A response with more calls than this is treated as text without calls."""
MAX_CALL_CHARACTERS = 1 << 18


def read_answer(text: str, prompt_end: str | None, tools: Tools) -> ParsedAnswer:
    """Return the parts of a response; see :data:`trinity_mq.families.family.ReadAnswer`. Without tools nothing is a
    call.
    """
    content, calls = parse_tool_calls(text, prompt_end) if tools else (text, [])
    return ParsedAnswer(content, calls=calls)


def parse_tool_calls(text: str, prompt_end: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the tool calls in ``text``, and the calls in the form of the API.

    If any call is malformed, the whole text is returned without calls. A call inside thoughts is text. The time is
    linear in the length of the text.

    Args:
        text: The response.
        prompt_end: See :func:`answer_spans`.
    """
    answers = [(start, text[start:end].split(CALL_BEGINS)) for start, end in answer_spans(text, prompt_end)]
    blocks = [block for _, pieces in answers for block in pieces[1:]]
    if not blocks or len(blocks) > MAX_CALLS:
        return text, []
    calls = [_call(block) for block in blocks]
    valid = [call for call in calls if call is not None]
    if len(valid) < len(calls):
        return text, []
    first = next(start + len(pieces[0]) for start, pieces in answers if len(pieces) > 1)
    return text[:first].rstrip(), valid


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
    name, arguments = repair_surrogates(call["name"]), repair_surrogates(arguments)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
