"""Reads tool calls of the DeepSeek models.

Formats: V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments as a Markdown block of JSON; V3.1 writes
``NAME<｜tool▁sep｜>{...}``. Both stand between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.
"""

from __future__ import annotations

import re

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALLS, decode_value
from trinity_mq.families.messages import Message, Tools

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGINS, CALL_ENDS, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = r"([^\s<`{]{1,256})"
_HEAD = re.compile(
    rf"\s*{CALL_BEGINS}(?:function{SEPARATOR}{_NAME}\s{{0,8}}```(?:json)?\s{{0,8}}|{_NAME}{SEPARATOR}\s{{0,8}})"
)
_END = re.compile(rf"\s*(?:```)?\s*(?:{CALL_ENDS}|\Z)")
_CALLS_END = re.compile(rf"\s*(?:{CALLS_END}|<｜end▁of▁sentence｜>)*")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`. If any call is malformed, the
    answer has no calls.
    """
    del tools  # JSON gives the types of arguments
    calls: list[Message] = []
    place = len(CALLS_BEGIN) if text.startswith(CALLS_BEGIN) else 0
    while head := _HEAD.match(text, place):
        try:
            arguments, end = decode_value(text, head.end())
        except ValueError:
            return ReadCalls([], 1)
        ending = _END.match(text, end)
        if not isinstance(arguments, dict) or ending is None or len(calls) == MAX_CALLS:
            return ReadCalls([], 1)
        calls.append(api_call(head[1] or head[2], arguments))
        place = ending.end()
    ending = _CALLS_END.match(text, place)
    rest = text[ending.end() if ending else place :].strip()
    is_cut = CALL_BEGINS in rest
    return ReadCalls([] if is_cut else calls, int(is_cut or not calls), rest)
