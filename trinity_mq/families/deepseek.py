"""Reads tool calls of DeepSeek V3.1: ``NAME<sep>{...}`` between marks. Earlier models write the type, the name and a
block of code; :mod:`trinity_mq.families.library` reads them.

Format: chat template of DeepSeek V3.1.
"""

from __future__ import annotations

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALLS, decode_value
from trinity_mq.families.messages import Message, Tools


def _mark(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL_BEGINS, CALL_ENDS, SEPARATOR = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
_LONGEST_NAME = 256


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`. If any call is malformed, the
    answer has no calls.
    """
    del tools  # JSON gives the types of arguments
    calls: list[Message] = []
    place = len(CALLS_BEGIN)
    while text.startswith(CALL_BEGINS, place):
        begin = place + len(CALL_BEGINS)
        separator = text.find(SEPARATOR, begin, begin + _LONGEST_NAME)
        if separator < 0 or len(calls) == MAX_CALLS:
            return ReadCalls([], 1)
        try:
            arguments, end = decode_value(text, separator + len(SEPARATOR))
        except ValueError:
            return ReadCalls([], 1)
        name = text[begin:separator].strip()
        if not isinstance(arguments, dict) or not name or not text.startswith(CALL_ENDS, end):
            return ReadCalls([], 1)
        calls.append(api_call(name, arguments))
        place = end + len(CALL_ENDS)
    return ReadCalls(calls, int(not calls), text[place:].removeprefix(CALLS_END).strip())
