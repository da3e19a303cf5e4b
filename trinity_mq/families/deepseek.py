"""Reads tool calls of the DeepSeek models. Between marks, V3.1 writes ``NAME<sep>{...}``. V3 and R1 write a type, a
name and a block of code: ``function<sep>NAME``, a line with three backticks and ``json``, ``{...}``, three backticks.

Format: chat templates of DeepSeek V3, R1 and V3.1.
"""

from __future__ import annotations

import re
from typing import Any

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALLS, decode_value
from trinity_mq.families.messages import Message, Tools


def _mark(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL_BEGINS, CALL_ENDS, SEPARATOR = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
_LONGEST_NAME = 256
_NAMED = re.compile(rf"[ \t]*([^\s{{`]{{1,{_LONGEST_NAME}}})[ \t]*\n\s*(?P<fence>```(?:json)?)?")
"""Name and beginning of the block behind the separator, in the form of V3 and R1."""
_FENCE_ENDS = re.compile(r"\s*```\s*")
_BLANKS = re.compile(r"\s*")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`."""
    del tools  # JSON gives the types of arguments
    calls: list[Message] = []
    place = _behind_blanks(text, len(CALLS_BEGIN))
    while text.startswith(CALL_BEGINS, place):
        begin = place + len(CALL_BEGINS)
        separator = text.find(SEPARATOR, begin, begin + _LONGEST_NAME + len(SEPARATOR))
        if separator < 0 or len(calls) == MAX_CALLS:
            return ReadCalls([], 1)
        name, arguments, end = _call(text, text[begin:separator].strip(), separator + len(SEPARATOR))
        if not isinstance(arguments, dict) or not name or not text.startswith(CALL_ENDS, end):
            return ReadCalls([], 1)
        calls.append(api_call(name, arguments))
        place = _behind_blanks(text, end + len(CALL_ENDS))
    return ReadCalls(calls, int(not calls), text[place:].removeprefix(CALLS_END).strip())


def _call(text: str, head: str, place: int) -> tuple[str, Any, int]:
    """Return the name, the arguments and the end of a call whose separator ends at ``place``.

    Args:
        text: The answer.
        head: Text before the separator.
        place: End of the separator.

    Raises:
        ValueError: The arguments are not JSON.
    """
    named = _NAMED.match(text, place)
    if named is None:
        arguments, end = decode_value(text, place)
        return head, arguments, _behind_blanks(text, end)
    arguments, end = decode_value(text, named.end())
    fence_ends = _FENCE_ENDS.match(text, end) if named["fence"] else None
    return named[1], arguments, fence_ends.end() if fence_ends else _behind_blanks(text, end)


def _behind_blanks(text: str, place: int) -> int:
    match = _BLANKS.match(text, place)
    assert match is not None
    return match.end()
