"""Chat messages and tools in one common form: one reader for API requests and for training data in chat form.

:func:`read_messages` and :func:`read_tools` convert sent or stored messages and tools to one form. A
:class:`~trinity_mq.families.family.Family` converts that form to the form that its chat templates read. :class:`Probe`
shows whether a template writes all parts of the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Message] | None
THOUGHTS = "reasoning_content"
"""Key of an assistant message that holds its thoughts, in the form of the APIs of vLLM and DeepSeek."""
THOUGHT_KEYS = (THOUGHTS, "reasoning", "thinking")
"""Keys of a message that hold thoughts, in APIs and in chat templates."""
MAX_TOOLS = 128
MAX_ROLE_CHARACTERS = 64


class MessageError(ValueError):
    """Messages or tools deviate from the form of the OpenAI API. The text names the place, the value and the expected
    form.
    """

    def __init__(self, problem: str, where: str) -> None:
        super().__init__(problem)
        self.where = where
        """Path of the fault, such as ``messages.0.role``."""


# -- conversion to the common form


def read_messages(messages: Sequence[Any], where: str = "messages") -> list[Message]:
    """Return messages with their content as text and the arguments of their tool calls as objects. Arguments that are
    not the JSON text of an object stay as they are, because a model may have written them.

    Keys that hold null are left out: API clients write them, and Arrow gives every message all keys of all messages. A
    ``function_call``, the API's form before ``tool_calls``, becomes a tool call. Thoughts of assistant messages come
    under ``reasoning_content``; parts of the type ``thinking`` are thoughts too. Thoughts of other roles are left out.

    Raises:
        MessageError: A message has no role, its content or its thoughts are not text, or its calls do not have the form
            of the API.
    """
    return [_message(message, f"{where}.{number}") for number, message in enumerate(messages)]


def read_tools(tools: Sequence[Any], where: str = "tools") -> list[Message]:
    """Check the offered tools and return them as dictionaries.

    Raises:
        MessageError: A tool is not a function with a name, its parameters are not an object, or there are too many
            tools.
    """
    if len(tools) > MAX_TOOLS:
        raise MessageError(f"{where} holds {len(tools)} tools, wanted at most {MAX_TOOLS}", where)
    return [_tool(tool, f"{where}.{number}") for number, tool in enumerate(tools)]


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that hold null, at every depth: an Arrow struct has all keys of all rows."""
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list | tuple) else value


def has_at_most(value: Any, characters: int) -> bool:
    """Return whether the texts in ``value``, keys included, have at most ``characters`` characters in total."""
    pending = [value]
    while pending and characters >= 0:
        part = pending.pop()
        if isinstance(part, str):
            characters -= len(part)
        elif isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
    return characters >= 0


def _message(message: Any, where: str) -> Message:
    present = _present(message) if isinstance(message, Mapping) else {}
    role = present.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARACTERS:
        raise MessageError(f"{where}.role is {role!r:.80}, wanted a role such as user", f"{where}.role")
    calls, function_call = present.pop("tool_calls", None), present.pop("function_call", None)
    if not calls and function_call:
        calls = [{"function": function_call}]
    content = present.get("content")
    thoughts = "" if present.keys().isdisjoint(THOUGHT_KEYS) else _thoughts(present, where)
    if isinstance(content, list | tuple):
        parts = [part for part in content if not _is_thinking(part)]
        thoughts = thoughts or "\n\n".join(str(part.get("thinking") or "") for part in content if _is_thinking(part))
        content = parts
    converted = {**present, "content": _text(content, f"{where}.content")}
    if thoughts and role == "assistant":
        converted[THOUGHTS] = thoughts
    return {**converted, "tool_calls": _calls(calls, f"{where}.tool_calls")} if calls else converted


def _thoughts(message: Message, where: str) -> str:
    """Remove the thoughts from a message and return them."""
    values = [message.pop(name, None) for name in THOUGHT_KEYS]
    thoughts = next((value for value in values if value), "")
    if not isinstance(thoughts, str):
        raise MessageError(f"{where}.{THOUGHTS} is a {type(thoughts).__name__}, wanted text", f"{where}.{THOUGHTS}")
    return thoughts


def _is_thinking(part: Any) -> bool:
    """Return whether a part of a content holds thoughts, in the form of Anthropic's and Mistral's APIs."""
    return isinstance(part, Mapping) and part.get("type") == "thinking"


def _text(content: Any, where: str) -> str:
    if isinstance(content, list | tuple):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise MessageError(f"{where} holds a part that is not text, wanted parts of the type text only", where)
        return "".join(map(str, parts))
    if not isinstance(content, str | None):
        raise MessageError(f"{where} is a {type(content).__name__}, wanted text", where)
    return content or ""


def _calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list | tuple):
        raise MessageError(f"{where} is a {type(calls).__name__}, wanted a list of calls", where)
    return [_call(call, f"{where}.{number}") for number, call in enumerate(calls)]


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(
            f"{where}.function has no name; give a call as the model answers it, with name and arguments", where
        )
    function = {**_present(function), "arguments": _arguments(function.get("arguments"))}
    return {"type": "function", **_present(call), "function": function}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # a model may write invalid JSON; templates also take text
    return parsed if isinstance(parsed, dict) else arguments


def _tool(tool: Any, where: str) -> Message:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        tool_type = tool.get("type") if isinstance(tool, Mapping) else tool
        raise MessageError(f"{where}.type is {json.dumps(tool_type, default=str)[:80]}, wanted 'function'", where)
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError(f"{where}.function has no name; give an object with name and parameters", where)
    if not isinstance(function.get("parameters", {}), Mapping):
        raise MessageError(f"{where}.function.parameters is not an object, wanted a JSON schema", where)
    return dict(tool)


def _present(value: Mapping[str, Any]) -> Message:
    return {name: part for name, part in value.items() if part is not None}


# -- parts that a template leaves out


class MessageOutline(NamedTuple):
    """A message without its text: the properties that decide whether a template writes it."""

    role: str
    has_text: bool
    calls: int
    has_text_arguments: bool


def shape_of(messages: Messages) -> tuple[MessageOutline, ...]:
    """Return the shape of a conversation: its messages without their text."""
    return tuple(
        MessageOutline(message["role"], bool(message.get("content")), len(calls), _has_text_arguments(calls))
        for message in messages
        for calls in [message.get("tool_calls") or ()]
    )


def _has_text_arguments(calls: Sequence[Message]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in calls)


class Probe:
    """A conversation of a given shape with marks instead of text. A mark that is missing from the rendered text shows a
    part that the template leaves out.

    Args:
        shape: Shape of the messages.
        has_tools: Whether tools are offered.
    """

    def __init__(self, shape: Sequence[MessageOutline], *, has_tools: bool) -> None:
        self._marks: dict[str, str] = {}
        """Maps each mark to a description of the part of the conversation that the mark stands for."""
        self.tools = [_offered(self._mark("tools"))] if has_tools else None
        self.messages = [self._message(number, turn) for number, turn in enumerate(shape)]

    def left_out(self, text: str) -> str:
        """Return the first part that ``text``, the rendered probe, leaves out; empty if it leaves out nothing."""
        return next((description for mark, description in self._marks.items() if mark not in text), "")

    def _mark(self, description: str) -> str:
        mark = f"tmq{len(self._marks)}q"
        self._marks[mark] = description
        return mark

    def _message(self, number: int, turn: MessageOutline) -> Message:
        is_answered = turn.has_text and not turn.calls  # some families write no text next to calls
        content = self._mark(f"the role {turn.role} (messages.{number})") if is_answered else "text" * turn.has_text
        message: Message = {"role": turn.role, "content": content}
        if turn.role == "tool":
            message |= {"tool_call_id": "call00000", "name": "called"}
        if turn.calls:
            description = f"tool calls (messages.{number})"
            message["tool_calls"] = [
                _called(self._mark(description), turn.has_text_arguments) for _ in range(turn.calls)
            ]
        return message


def _called(name: str, is_text: bool) -> Message:
    function = {"name": name, "arguments": "{}" if is_text else {}}
    return {"id": "call00000", "type": "function", "function": function}


def _offered(name: str) -> Message:
    parameters = {"type": "object", "properties": {}, "required": []}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}
