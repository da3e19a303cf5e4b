"""Calls as JSON objects with a name and arguments: the form inside the marks of several families."""

from __future__ import annotations

import json
from typing import Any

from trinity_mq.families.family import api_call
from trinity_mq.families.messages import Message

MAX_CALLS = 64
"""An answer with more calls than this is treated as text without calls."""
MAX_CALL_CHARACTERS = 1 << 18
"""Maximum characters of a call in JSON, and of all calls of an answer in other forms."""
_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


def decode_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins in ``text`` at ``start``, and the place of its end. Blanks before it are
    skipped. The time is limited by :data:`MAX_CALL_CHARACTERS`.

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


def call_of(value: Any, *keys: str) -> Message | None:
    """Return the call that a decoded JSON object describes. None: it has no name, or arguments of another type.

    Args:
        value: A decoded JSON value.
        keys: Keys under which the arguments may stand; the first key that the object has applies.

    Raises:
        ValueError: As :func:`~trinity_mq.families.family.api_call`.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict | str):
        return None
    call_id = value.get("id")
    return api_call(value["name"], arguments, call_id if isinstance(call_id, str) and call_id else None)


def calls_of_list(value: Any, *keys: str) -> list[Message] | None:
    """Return the calls of a decoded JSON list. None: it is another value; otherwise as :func:`call_of`."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CALLS:
        return None
    calls = [call_of(part, *keys) for part in value]
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else None
