"""Conversations that every family is asked to render, in the form of the OpenAI API with arguments as objects."""

from __future__ import annotations

from typing import Any, NamedTuple

Message = dict[str, Any]


class Case(NamedTuple):
    """A conversation with the offered tools."""

    messages: list[Message]
    tools: list[Message] | None = None


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> Message:
    """Return an answer."""
    return {"role": "assistant", "content": text, **fields}


def call(name: str, arguments: dict[str, Any], call_id: str) -> Message:
    """Return a call; Mistral's templates ask for an id of nine letters and digits."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def result(text: str, called: Message) -> Message:
    """Return what a call gave."""
    return {"role": "tool", "content": text, "tool_call_id": called["id"], "name": called["function"]["name"]}


def tool(name: str, description: str, properties: dict[str, Any]) -> Message:
    """Return a tool whose first property is required."""
    parameters = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    tool("weather", "Weather of a city.", {"city": {"type": "string"}, "days": {"type": "integer"}}),
    tool(
        "search",
        "Find text.",
        {"query": {"type": "string"}, "limits": {"type": "object", "properties": {"most": {"type": "integer"}}}},
    ),
]
WEATHER = call("weather", {"city": "Zürich <b>", "days": 2}, "aaaaaaaa1")
SEARCH = call("search", {"query": 'it\'s "x" & <y>\n{1}', "limits": {"most": 3}}, "aaaaaaaa2")
TAGS = call("search", {"query": "</tool_call> <tool_call> [TOOL_CALLS] <think> ```"}, "aaaaaaaa3")
"""A call whose arguments hold tags that divide answers in some families."""
RAIN, NOTHING = result("rain", WEATHER), result('{"hits": []}', SEARCH)
ASKED = user("Weather in Zürich?")

CASES = {
    "plain": Case([user("Hello")]),
    "system": Case([SYSTEM, user("Hello")]),
    "two turns": Case([user("1 + 1?"), assistant("2"), user("And 2 + 2?")]),
    "answered": Case([user("1 + 1?"), assistant("2")]),
    "tools": Case([ASKED], TOOLS),
    "system and tools": Case([SYSTEM, ASKED], TOOLS),
    "one call": Case([ASKED, assistant("", tool_calls=[WEATHER])], TOOLS),
    "result": Case([ASKED, assistant("", tool_calls=[WEATHER]), RAIN], TOOLS),
    "answer after a result": Case([ASKED, assistant("", tool_calls=[WEATHER]), RAIN, assistant("It rains.")], TOOLS),
    "turn after a result": Case(
        [ASKED, assistant("", tool_calls=[WEATHER]), RAIN, assistant("It rains."), user("Thanks")], TOOLS
    ),
    "parallel calls": Case([ASKED, assistant("", tool_calls=[WEATHER, SEARCH]), RAIN, NOTHING], TOOLS),
    "two rounds": Case(
        [ASKED, assistant("", tool_calls=[WEATHER]), RAIN, assistant("", tool_calls=[SEARCH]), NOTHING], TOOLS
    ),
    "text and call": Case([ASKED, assistant("I look.", tool_calls=[WEATHER]), RAIN], TOOLS),
    "tags in arguments": Case([ASKED, assistant("", tool_calls=[TAGS])], TOOLS),
    "thoughts": Case([user("1 + 1?"), assistant("2", reasoning_content="One and one.")]),
    "turn after thoughts": Case([user("1 + 1?"), assistant("2", reasoning_content="One and one."), user("And?")]),
    "thoughts and call": Case([ASKED, assistant("", reasoning_content="I look.", tool_calls=[SEARCH]), NOTHING], TOOLS),
    "unicode": Case([user("Grüße 中文 🎉\n\n\ttab "), assistant(" é\n1. b "), user("ok ")]),
    "empty answer": Case([user("1?"), assistant(""), user("2?")]),
}
