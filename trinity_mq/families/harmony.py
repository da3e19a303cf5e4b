"""Reads answers of gpt-oss, in OpenAI's format harmony: messages in channels.

The prompt ends with ``<|start|>assistant``, so an answer begins with a header. Thoughts stand in the channel analysis,
text in final or, before calls, in commentary. A call is a message to ``functions.NAME`` with JSON arguments. The
recipient stands before the channel (maker's chat template and encoder) or behind it (the model also samples that).

Format: package openai-harmony; chat template of gpt-oss.
"""

from __future__ import annotations

import re

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALLS, decode_value
from trinity_mq.families.messages import Message, Tools
from trinity_mq.families.thoughts import HARMONY_CHANNEL, HARMONY_START

CALL_BEGINS = tuple(
    f"{start}{channel} to=functions."
    for start in (HARMONY_START, "")
    for channel in (f"{HARMONY_CHANNEL}commentary", "")
)
_HEAD = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? to=functions\.(?P<name>[^\s<|]{1,256})"
    r"(?:<\|channel\|>commentary)?\s{0,8}(?:<\|constrain\|>)?\w{0,32}<\|message\|>"
)
_END = re.compile(r"\s*(?:<\|call\|>|<\|end\|>|<\|return\|>|\Z)\s*")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`."""
    del tools  # JSON gives the types of arguments
    calls: list[Message] = []
    place = 0
    while head := _HEAD.match(text, place):
        arguments, end = decode_value(text, head.end())
        ending = _END.match(text, end)
        if not isinstance(arguments, dict) or ending is None or len(calls) == MAX_CALLS:
            return ReadCalls([], 1)
        calls.append(api_call(head["name"], arguments))
        place = ending.end()
    return ReadCalls(calls, int(not calls), text[place:])
