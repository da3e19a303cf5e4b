"""Tools in a chat: what may be offered, and the calls in what a model wrote, in the form of the Hermes and Qwen models:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Format: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from trinity_mq.models.engines.api_errors import bad_request

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
MAX_CALLS = 64
"""More calls than this in one response are no calls: it is left as text."""
MAX_CALL_CHARACTERS = 1 << 18


def checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools of a request, for the chat template.

    Raises:
        ApiError: 400; one is no function with a name.
    """
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)} tools, at most {MAX_TOOLS} are taken", "tools")
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            seen = tool.get("type") if isinstance(tool, dict) else tool
            raise bad_request(f"{where}.type is {json.dumps(seen)[:80]}, wanted 'function'", where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"{where}.function has no name; give an object with name and parameters", where)
        if not isinstance(function.get("parameters", {}), dict):
            raise bad_request(f"{where}.function.parameters is no object, wanted a JSON schema", where)
    return list(tools)


def checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant's message for the chat template, ids kept, arguments as objects.

    Templates write arguments as JSON themselves: a text would be written as a JSON string.

    Raises:
        ApiError: 400; they are not in the API's form.
    """
    if not isinstance(calls, list):
        raise bad_request(f"{where} is a {type(calls).__name__}, wanted a list of calls", where)
    return [_checked_call(call, f"{where}.{number}") for number, call in enumerate(calls)]


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function has no name; give what the model answered, or the like", where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments  # what a model wrote need not be JSON; templates take texts too
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the tool calls in ``text``, and the calls as the API gives them.

    All of them are understood or none is: then the whole text comes back and no calls. Takes time linear in the text.
    """
    head, *blocks = text.split(CALL_BEGINS)
    if not blocks or len(blocks) > MAX_CALLS:
        return text, []
    calls = [_call(block) for block in blocks]
    understood = [call for call in calls if call is not None]
    return (head.rstrip(), understood) if len(understood) == len(calls) else (text, [])


def _call(block: str) -> dict[str, Any] | None:
    # a response may end with the call, without the closing tag
    written, _, _ = block.partition(CALL_ENDS)
    if len(written) > MAX_CALL_CHARACTERS:
        return None
    try:
        call = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
