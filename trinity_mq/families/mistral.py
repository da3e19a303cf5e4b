"""Reads tool calls of the Mistral models.

Formats, by the version of the tokenizer (package mistral-common): 2 to 7 write ``[TOOL_CALLS][{"name": ...,
"arguments": {...}, "id": ...}, ...]``; from 11 on each call is ``[TOOL_CALLS]name[ARGS]{...}``, in version 11 with
``[CALL_ID]id`` behind the name.
"""

from __future__ import annotations

import hashlib
import re

from trinity_mq.families.division import ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.json_calls import MAX_CALLS, calls_of_list, decode_value
from trinity_mq.families.messages import Message, Tools

CALL_BEGINS = "[TOOL_CALLS]"
_CALL_ID = re.compile("[A-Za-z0-9]{9}")
_HEAD = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]{1,256})(?:\[CALL_ID\]([^\[\]{}]{1,64}))?\[ARGS\]")
_LIST = re.compile(r"\[TOOL_CALLS\]\s*(?=\[)")
_END = re.compile(r"(?:\s|</s>)*")


def read_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the calls of an answer; see :data:`trinity_mq.families.division.CallReader`."""
    del tools  # JSON gives the types of arguments
    calls, end = _read(text)
    rest = text[end:]
    return ReadCalls([], 1) if CALL_BEGINS in rest else ReadCalls(calls, 0, rest)


def call_id(text: str) -> str:
    """Return an id of nine letters and digits, as the templates ask for: ``text`` itself, or a digest of it."""
    return text if _CALL_ID.fullmatch(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:9]


def _read(text: str) -> tuple[list[Message], int]:
    if listed := _LIST.match(text):
        value, end = decode_value(text, listed.end())
        calls = calls_of_list(value, "arguments")
        if calls is None:
            raise ValueError("it is no list of calls")
        return calls, _end(text, end)
    calls, end = [], 0
    while text.startswith(CALL_BEGINS, end):
        head = _HEAD.match(text, end)
        if head is None or len(calls) == MAX_CALLS:
            raise ValueError("a call has no name, or there are too many calls")
        arguments, end = decode_value(text, head.end())
        if not isinstance(arguments, dict):
            raise ValueError("arguments are not an object")
        calls.append(api_call(head[1], arguments, head[2]))
        end = _end(text, end)
    return calls, end


def _end(text: str, end: int) -> int:
    """Return the place behind blanks and the end of the sequence."""
    match = _END.match(text, end)
    assert match is not None
    return match.end()
