"""Parses tool calls from a model's text, in the form of the Hermes and Qwen models: ``<tool_call>{"name": ...,
"arguments": {...}}</tool_call>``.

Format: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import re
from typing import Any

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.json_calls import MAX_CALLS, call_of, decode_value
from trinity_mq.families.messages import Message, Tools
from trinity_mq.families.thoughts import answer_spans

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
_END = re.compile(rf"\s*(?:{CALL_ENDS}|(?={CALL_BEGINS})|\Z)")
"""End of a call: the closing tag, the beginning of the next call, or the end of the response."""


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the tool calls of an answer, or the number of malformed calls; see
    :data:`trinity_mq.families.division.CallReader`.
    """
    del tools  # JSON gives the types of arguments
    _, calls, malformed = _read(text, None)
    return ReadCalls(calls, malformed)


def parse_tool_calls(text: str, prompt_end: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the tool calls in ``text``, and the calls in the form of the API.

    If any call is malformed, or there are more than :data:`~trinity_mq.families.json_calls.MAX_CALLS` calls, the whole
    text is returned without calls. A call inside thoughts is text. The time is linear in the length of the text.

    Args:
        text: The response.
        prompt_end: The prompt, or its last characters, which may open thoughts. None: unknown.
    """
    first, calls, _ = _read(text, prompt_end)
    return text[:first].rstrip() if calls else text, calls


def _read(text: str, prompt_end: str | None) -> tuple[int, list[Message], int]:
    """Return the place of the first call, the calls, and the number of malformed calls."""
    calls: list[Message] = []
    places, malformed, first = 0, 0, len(text)
    for start, end in answer_spans(text, prompt_end):
        place = text.find(CALL_BEGINS, start, end)
        while place != -1:
            first, places = min(first, place), places + 1
            if places > MAX_CALLS:
                return first, [], places
            place += len(CALL_BEGINS)
            try:
                call, place = _call(text, place)
            except ValueError:
                malformed += 1
            else:
                calls.append(call)
            place = text.find(CALL_BEGINS, place, max(place, end))
    return first, [] if malformed else calls, malformed


def _call(text: str, place: int) -> tuple[Message, int]:
    """Return the call at ``place`` and the place of its end.

    Raises:
        ValueError: No call begins there.
    """
    value, end = decode_value(text, place)
    call, ending = call_of(value), _END.match(text, end)
    if call is None or ending is None:
        raise ValueError("it is no call")
    return call, ending.end()
