"""Tools and tool calls of the Responses API, as functions and function calls of chat completions.

Source of the formats: OpenAI API reference, "Responses": the types of ``tools``, of input items and of output items.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.gateway.protocols.base import BadRequest, as_list, as_object, definitions, parsed_arguments

Json = dict[str, Any]

WEB_SEARCH = ("web_search", "web_search_preview")
"""Types of the web search that OpenAI's servers run; a date may follow. Clients offer the search by default. The
engines here cannot search, and a model may always answer without a search, so it is left out."""
SERVERS = ("code_interpreter", "computer", "file_search", "image_generation", "mcp")
"""Beginnings of the types of other tools that OpenAI's servers run."""
LOCAL_SHELL = "local_shell"
SHELL_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
TAKEN_NAMES = ("name", "description", "parameters", "strict")
NAMESPACE_ENDS = "__"
"""Separator between the name of a namespace and the name of its function."""
TOOL_SEARCH = "tool_search"
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
"""Types of items that are calls of tools that the client runs."""
SEARCH_OUTPUT = "tool_search_output"
"""Type of the item with the tools that the client's search found."""
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", SEARCH_OUTPUT)


class ResponseTools:
    """The tools of a request, and the type of item that a call of each becomes.

    Args:
        body: Body of the request.

    Raises:
        BadRequest: A tool cannot be offered to this model, or two tools have the same name.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.offered: list[Json] = []
        """The tools of the request that the model is offered, as the client sent them."""
        self.functions: list[Json] = []
        """The tools as functions of chat completions."""
        self._items: dict[str, tuple[str, Json]] = {}
        """Type of a call's item, and the fields of the item that name the tool, for each function name."""
        for number, tool in enumerate(as_list(body.get("tools"), "tools")):
            where = f"tools.{number}"
            checked = dict(as_object(tool, where))
            if not _is_web_search(checked.get("type")):
                self.offered.append(checked)
                self.functions += self._functions(checked, where)
        items = body.get("input")
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict) and item.get("type") == SEARCH_OUTPUT:
                self.found_tools(item, f"input.{number}")

    def choice(self, choice: Any) -> Any:
        """Return ``tool_choice`` in the form of chat completions.

        Raises:
            BadRequest: The choice is not a function, a custom tool or the local shell, or its name is missing.
        """
        if not isinstance(choice, dict):
            return choice
        kind = str(choice.get("type"))
        name = LOCAL_SHELL if kind == LOCAL_SHELL else choice.get("name")
        if kind not in ("function", "custom", LOCAL_SHELL) or not isinstance(name, str):
            raise BadRequest(
                f"tool_choice is {json.dumps(choice)[:80]}, wanted auto, none, required, or a function or custom tool "
                "with its name",
                "tool_choice",
            )
        return {"type": "function", "function": {"name": name}}

    def item(self, call: Mapping[str, Any]) -> Json:
        """Return the output item of a call of the model. A call of an unknown tool becomes a function call, so that the
        client reports the error to the model.
        """
        function = call.get("function") or {}
        name, arguments = str(function.get("name")), function.get("arguments") or "{}"
        kind, names = self._items.get(name, ("function_call", {"name": name}))
        call_id = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
        item = {"type": kind, "call_id": call_id, "status": "completed", **names}
        match kind:
            case "custom_tool_call":
                return {**item, "id": f"ctc_{call_id}", "input": _input(arguments)}
            case "local_shell_call":
                return {**item, "id": f"lsh_{call_id}", "action": _action(arguments)}
            case "tool_search_call":
                return {**item, "id": f"tsc_{call_id}", "arguments": _parsed(arguments)}
            case _:
                return {**item, "id": f"fc_{call_id}", "arguments": arguments}

    def found_tools(self, item: Mapping[str, Any], where: str) -> str:
        """Return the text that shows the model the tools that a search of the client found. From now on, :meth:`item`
        accepts calls of these tools.
        """
        tools = as_list(item.get("tools"), f"{where}.tools")
        functions = [
            function
            for number, tool in enumerate(tools)
            for function in self._functions(as_object(tool, where), f"{where}.tools.{number}", is_search=True)
        ]
        return definitions([function["function"] for function in functions])

    def _functions(self, tool: Mapping[str, Any], where: str, *, is_search: bool = False) -> list[Json]:
        """Return a tool of the request as functions. A search may find a tool again."""
        functions = []
        for function, kind, names in _functions_of(tool, where):
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise BadRequest(f"{where}.name is {name!r:.80}, wanted a name", where)
            if name in self._items and not is_search:
                raise BadRequest(f"{where} is a second tool with the name {name!r:.80}", where)
            self._items[name] = kind, names
            functions.append({"type": "function", "function": function})
        return functions


def _functions_of(tool: Mapping[str, Any], where: str) -> list[tuple[Json, str, Json]]:
    """Return the functions of a tool. Each is a definition, the type of a call's item, and the fields of the item that
    name the tool.
    """
    names = {"name": tool.get("name")}
    match tool.get("type"):
        case "function":
            return [({name: tool[name] for name in TAKEN_NAMES if tool.get(name) is not None}, "function_call", names)]
        case "namespace":
            inner_tools = as_list(tool.get("tools"), f"{where}.tools")
            return [
                _in_namespace_of(tool, as_object(inner, where), f"{where}.tools.{number}")
                for number, inner in enumerate(inner_tools)
            ]
        case "custom":
            text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            function = {**names, "description": _custom_description(tool, where), "parameters": text}
            return [(function, "custom_tool_call", names)]
        case "local_shell":
            function = {"name": LOCAL_SHELL, "description": "Runs a command.", "parameters": SHELL_PARAMETERS}
            return [(function, "local_shell_call", {})]
        case "tool_search" if tool.get("execution") == "client":
            function = {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
            return [({"name": TOOL_SEARCH, **function}, "tool_search_call", {"execution": "client"})]
        case str() as kind if kind.startswith((*SERVERS, TOOL_SEARCH)):
            raise BadRequest(f"{where} is of type {kind!r}, which runs on servers of OpenAI; leave it out", where)
        case kind:
            raise BadRequest(
                f"{where} is of type {kind!r}; this model takes function, namespace, custom and local_shell", where
            )


def _in_namespace_of(namespace: Mapping[str, Any], tool: Mapping[str, Any], where: str) -> tuple[Json, str, Json]:
    if tool.get("type") != "function":
        raise BadRequest(f"{where} is of type {tool.get('type')!r}; a namespace holds functions", where)
    names = {"name": tool.get("name"), "namespace": namespace.get("name")}
    descriptions = [text for text in (namespace.get("description"), tool.get("description")) if text]
    function = {name: tool[name] for name in ("parameters", "strict") if tool.get(name) is not None}
    if descriptions:
        function["description"] = "\n".join(map(str, descriptions))
    return {"name": _in_namespace(names), **function}, "function_call", names


def call_of_item(item: Mapping[str, Any]) -> Json:
    """Return the tool call that an input item of one of the types :data:`CALLS` stands for."""
    match item.get("type"):
        case "custom_tool_call":
            name, arguments = item.get("name"), json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        case "local_shell_call":
            action = as_object(item.get("action"), "action")
            fields = {name: action[name] for name in SHELL_PARAMETERS["properties"] if action.get(name) is not None}
            name, arguments = LOCAL_SHELL, json.dumps(fields, ensure_ascii=False)
        case "tool_search_call":
            name, arguments = TOOL_SEARCH, json.dumps(item.get("arguments") or {}, ensure_ascii=False)
        case _:
            name, arguments = _in_namespace(item), item.get("arguments") or "{}"
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_events(item: Json) -> list[tuple[str, Json]]:
    """Return the types and the fields of the events of a streamed call, without the place of the item."""
    match item["type"]:
        case "custom_tool_call":
            begun, name, field = {**item, "input": ""}, "custom_tool_call_input", "input"
        case "function_call":
            begun, name, field = {**item, "arguments": ""}, "function_call_arguments", "arguments"
        case _:
            begun, name, field = item, "", ""
    events: list[tuple[str, Json]] = [("response.output_item.added", {"item": {**begun, "status": "in_progress"}})]
    if field:
        named = {"name": item["name"]} if field == "arguments" else {}
        events.append((f"response.{name}.delta", {"item_id": item["id"], "delta": item[field]}))
        events.append((f"response.{name}.done", {"item_id": item["id"], field: item[field], **named}))
    return [*events, ("response.output_item.done", {"item": item})]


def _is_web_search(kind: Any) -> bool:
    return isinstance(kind, str) and any(kind == name or kind.startswith(f"{name}_20") for name in WEB_SEARCH)


def _in_namespace(names: Mapping[str, Any]) -> Any:
    """Return the name of a function for the model: the function's own name after its namespace, if any."""
    namespace = names.get("namespace")
    return f"{namespace}{NAMESPACE_ENDS}{names.get('name')}" if namespace else names.get("name")


def _custom_description(tool: Mapping[str, Any], where: str) -> str:
    """Return the description of a tool that takes free text, with its grammar: nothing enforces the grammar."""
    form = as_object(tool.get("format"), f"{where}.format")
    texts: Sequence[Any] = [tool.get("description")]
    if form.get("type") == "grammar":
        texts = [*texts, f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"]
    return "\n".join(str(text) for text in texts if text)


def _input(arguments: str) -> str:
    """Return the text that a call of a custom tool gives; the arguments themselves if they have another form."""
    parsed = _parsed(arguments)
    text = parsed.get("input")
    return text if isinstance(text, str) and len(parsed) == 1 else arguments


def _action(arguments: str) -> Json:
    parsed = _parsed(arguments)
    command = parsed.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    words = [str(word) for word in command] if isinstance(command, list) else []
    variables = parsed.get("env")
    return {
        "type": "exec",
        "command": words,
        "env": {str(key): str(value) for key, value in variables.items()} if isinstance(variables, dict) else {},
        "timeout_ms": parsed["timeout_ms"] if type(parsed.get("timeout_ms")) is int else None,
        "working_directory": parsed["working_directory"] if isinstance(parsed.get("working_directory"), str) else None,
        "user": None,
    }


def _parsed(arguments: str) -> Json:
    parsed = parsed_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {}
