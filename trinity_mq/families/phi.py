"""Reads tool calls of Phi-4-mini: a JSON list ``[{"name": ..., "arguments": {...}}, ...]`` behind a mark. Phi-3 and
Phi-3.5 have no format for calls.

Format: the model card of Phi-4-mini-instruct writes ``<|tool_call|>[...]<|/tool_call|>``; the model also writes
``functools[...]``, which vLLM reads.
"""

from __future__ import annotations

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.json_calls import calls_of_list, decode_value
from trinity_mq.families.messages import Tools

CALL_BEGINS = ("<|tool_call|>", "functools[")
_ENDS = ("<|/tool_call|>", "<|end|>")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`."""
    del tools  # JSON gives the types of arguments
    mark = next((mark for mark in CALL_BEGINS if text.startswith(mark)), "")
    value, end = decode_value(text, len(mark.removesuffix("[")))
    calls = calls_of_list(value, "arguments", "parameters")
    if calls is None:
        return ReadCalls([], 1)
    rest = text[end:].strip()
    for ending in _ENDS:
        rest = rest.removeprefix(ending).lstrip()
    return ReadCalls(calls, 0, rest)
