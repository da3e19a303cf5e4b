"""Reads tool calls written as JSON: the forms of DeepSeek, gpt-oss, Mistral, Phi and Llama, and parts shared with
Hermes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from trinity_mq.families.division import CallReader, ReadCalls
from trinity_mq.families.family import api_call
from trinity_mq.families.messages import Message, Tools
from trinity_mq.families.thoughts import HARMONY_CHANNEL, HARMONY_START

MAX_CALLS = 64
"""An answer with more calls than this is treated as text without calls."""
MAX_CALL_CHARACTERS = 1 << 18
"""Maximum characters of a single JSON value, and of all calls of an answer that the package ``renderers`` reads."""
ARGUMENTS = ("arguments", "parameters")
"""Keys that may hold the arguments of a call; the first of these keys in the object applies."""
_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


def decode_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins in ``text`` at ``start``, and the position of its end. Blanks before the value
    are skipped. At most :data:`MAX_CALL_CHARACTERS` characters are read.

    Raises:
        ValueError: No JSON value begins there, it does not end, or it is nested too deeply.
    """
    section = text[start : start + MAX_CALL_CHARACTERS]
    begin = len(section) - len(section.lstrip(_BLANKS))
    try:
        value, end = _DECODER.raw_decode(section, begin)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    return value, start + end


def call_of(value: Any) -> Message | None:
    """Return the tool call that a decoded JSON object describes. None: the object has no name, or its arguments are
    neither an object nor text.

    Raises:
        ValueError: As :func:`~trinity_mq.families.family.api_call`.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    if not isinstance(arguments, dict | str):
        return None
    call_id = value.get("id")
    return api_call(value["name"], arguments, call_id if isinstance(call_id, str) and call_id else None)


def marked_calls(head: str, end: str, *marks: str) -> CallReader:
    """Return a reader of tool calls that are each written as a head, a JSON value and an end.

    Args:
        head: Pattern of the beginning of a call. Its group ``name`` holds the name of the tool, and its optional group
            ``id`` the id of the call; the JSON value is then the arguments. If the head lacks a name, the JSON value is
            a list of calls.
        end: Pattern of the text between the JSON and the next call.
        marks: Texts; every head contains at least one. An answer with one of them behind its calls is malformed.
    """
    begins, ends = re.compile(head), re.compile(end)

    def read(text: str, tools: Tools) -> ReadCalls:
        del tools  # JSON gives the types of arguments
        calls: list[Message] = []
        place = 0
        while begin := begins.match(text, place):
            value, stop = decode_value(text, begin.end())
            ending = ends.match(text, stop)
            listed = _listed(value, begin.groupdict())
            if listed is None or ending is None or len(calls) + len(listed) > MAX_CALLS:
                return ReadCalls([], 1)
            calls += listed
            place = ending.end()
        rest = text[place:].strip()
        if not calls or any(mark in rest for mark in marks):
            return ReadCalls([], 1)
        return ReadCalls(calls, 0, rest)

    return read


def _listed(value: Any, head: Mapping[str, str | None]) -> list[Message] | None:
    """Return the calls that the JSON value after a head describes. ``head`` holds the groups of the head's match. None:
    the value does not have this form.
    """
    if (name := head.get("name")) is not None:
        return [api_call(name, value, head.get("id"))] if isinstance(value, dict) else None
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CALLS:
        return None
    calls = [call_of(part) for part in value]
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else None


# -- DeepSeek: between marks, V3.1 writes NAME<sep>{...}. V3 and R1 write a type, a name and a block of code:
# function<sep>NAME, a line with three backticks and json, {...}, three backticks. Format: chat templates.


def _mark(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


DEEPSEEK_BEGINS = _mark("tool calls begin")
_CALL_BEGINS, _CALL_ENDS, _SEPARATOR = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
_NAME = r"[^\s<{`]{1,256}"
read_deepseek_calls = marked_calls(
    rf"(?:{DEEPSEEK_BEGINS})?\s*{_CALL_BEGINS}\s*+((?:{_NAME})?\s*+{_SEPARATOR}[ \t]*+(?={_NAME}[ \t]*+\n))?"
    rf"(?P<name>{_NAME})(?(1)[ \t]*+\n\s*+(?:```(?:json)?)?|\s*+{_SEPARATOR})",
    rf"\s*+(?:```\s*+)?{_CALL_ENDS}\s*+(?:{_mark('tool calls end')})?\s*",
    _CALL_BEGINS,
)

# -- gpt-oss, in OpenAI's format harmony: messages in channels. The prompt ends with <|start|>assistant, so an answer
# begins with a header. Thoughts stand in the channel analysis, text in final or, before calls, in commentary. A call is
# a message to functions.NAME. The recipient stands before the channel (maker's chat template and encoder) or behind it
# (the model also samples that). Format: package openai-harmony; chat template of gpt-oss.

HARMONY_BEGINS = tuple(
    f"{start}{channel} to=functions."
    for start in (HARMONY_START, "")
    for channel in (f"{HARMONY_CHANNEL}commentary", "")
)
read_harmony_calls = marked_calls(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? to=functions\.(?P<name>[^\s<|]{1,256})"
    r"(?:<\|channel\|>commentary)?\s{0,8}(?:<\|constrain\|>)?\w{0,32}<\|message\|>",
    r"\s*(?:<\|call\|>|<\|end\|>|<\|return\|>|\Z)\s*",
    "to=functions.",
)

# -- Mistral, by the version of the tokenizer (package mistral-common): 2 to 7 write a list of calls behind
# [TOOL_CALLS]; from 11 on each call is [TOOL_CALLS]name[ARGS]{...}, in version 11 with [CALL_ID]id behind the name.

MISTRAL_BEGINS = "[TOOL_CALLS]"
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
read_mistral_calls = marked_calls(
    r"\[TOOL_CALLS\]\s*+"
    r"(?:(?=\[)|(?P<name>[^\s\[\]{}]{1,256})(?:\[CALL_ID\](?P<id>[^\[\]{}]{1,64}))?\[ARGS\])",
    r"(?:\s|</s>)*",
    MISTRAL_BEGINS,
)


def mistral_call_id(text: str) -> str:
    """Return an id of nine letters and digits, as the templates ask for: ``text`` itself, or a digest of it."""
    return text if _MISTRAL_ID.fullmatch(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:9]


# -- Phi-4-mini: a list of calls behind a mark. Phi-3 and Phi-3.5 have no format for calls. Format: the model card of
# Phi-4-mini-instruct writes <|tool_call|>[...]<|/tool_call|>; the model also writes functools[...], which vLLM reads.

PHI_BEGINS = ("<|tool_call|>", "functools[")
read_phi_calls = marked_calls(r"<\|tool_call\|>|functools(?=\[)", r"(?:\s|<\|/tool_call\|>|<\|end\|>)*", *PHI_BEGINS)

# -- Llama 3: a JSON object {"name": ..., "parameters": {...}} instead of an answer. The models also write
# <|python_tag|> before an object and ; between several. Format: the chat templates of Llama 3.1 and 3.2.

_PYTHON = "<|python_tag|>"
LLAMA_BEGINS = (_PYTHON, '{"name":', '{"type": "function"')
_LLAMA_KEYS = frozenset(("type", "name", *ARGUMENTS))
_LLAMA_NAMED = re.compile("|".join(f'"{key}"\\s*:' for key in ARGUMENTS))
_LLAMA_BETWEEN = re.compile(r"(?:\s|;|<\|python_tag\|>|<\|eom_id\|>|<\|eot_id\|>)*")


def read_llama_calls(text: str, tools: Tools) -> ReadCalls:
    """Return the tool calls of an answer, or the number of malformed calls; see
    :data:`trinity_mq.families.division.CallReader`. A JSON object without parameters is content, not a call.
    """
    del tools  # JSON gives the types of arguments
    is_call = text.startswith(_PYTHON) or _LLAMA_NAMED.search(text) is not None
    calls: list[Message] = []
    end = _skip(text, 0)
    try:
        while text.startswith("{", end):
            value, end = decode_value(text, end)
            call = call_of(value) if _LLAMA_KEYS.issuperset(value) and set(value) & set(ARGUMENTS) else None
            if call is None or len(calls) == MAX_CALLS:
                return ReadCalls([], int(text.startswith(_PYTHON)))
            calls.append(call)
            end = _skip(text, end)
    except ValueError:
        return ReadCalls([], int(is_call))
    return ReadCalls(calls, int(is_call and not calls), text[end:] if calls else "")


def _skip(text: str, place: int) -> int:
    match = _LLAMA_BETWEEN.match(text, place)
    assert match is not None
    return match.end()
