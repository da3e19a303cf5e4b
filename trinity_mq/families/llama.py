"""Reads tool calls of the Llama 3 models: a JSON object ``{"name": ..., "parameters": {...}}`` instead of an answer.

Format: the chat templates of Llama 3.1 and 3.2. The models also write ``<|python_tag|>`` before an object and ``;``
between several.
"""

from __future__ import annotations

import re

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.json_calls import MAX_CALLS, call_of, decode_value
from trinity_mq.families.messages import Message, Tools

PYTHON = "<|python_tag|>"
CALL_BEGINS = (PYTHON, '{"name":', '{"type": "function"')
ARGUMENTS = ("parameters", "arguments")
_KEYS = frozenset(("type", "name", *ARGUMENTS))
_NAMED = re.compile("|".join(f'"{key}"\\s*:' for key in ARGUMENTS))
_BETWEEN = re.compile(r"(?:\s|;|<\|python_tag\|>|<\|eom_id\|>|<\|eot_id\|>)*")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`. An object without parameters
    is an answer in JSON, not a call.
    """
    del tools  # JSON gives the types of arguments
    is_call = text.startswith(PYTHON) or _NAMED.search(text) is not None
    calls: list[Message] = []
    end = _skip(text, 0)
    try:
        while text.startswith("{", end):
            value, end = decode_value(text, end)
            call = call_of(value, *ARGUMENTS) if _KEYS.issuperset(value) and set(value) & set(ARGUMENTS) else None
            if call is None or len(calls) == MAX_CALLS:
                return ReadCalls([], int(text.startswith(PYTHON)))
            calls.append(call)
            end = _skip(text, end)
    except ValueError:
        return ReadCalls([], int(is_call))
    return ReadCalls(calls, int(is_call and not calls), text[end:] if calls else "")


def _skip(text: str, place: int) -> int:
    match = _BETWEEN.match(text, place)
    assert match is not None
    return match.end()
