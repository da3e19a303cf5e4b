"""Anthropic's Messages API on top of chat completions.

Source of the format: Anthropic API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trinity_mq.gateway.protocols.base import (
    BadRequest,
    EngineRequest,
    Events,
    Protocol,
    as_json,
    as_list,
    as_object,
    assistant_message,
    begin_chat,
    definitions,
    named_event,
    parsed_arguments,
    seal_thoughts,
    text_of_parts,
    unseal_thoughts,
    usage_of,
)
from trinity_mq.gateway.protocols.openai import CHAT
from trinity_mq.models.recording.sse import thoughts_of

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
PASSED = ("temperature", "top_p", "return_token_ids", "chat_template_kwargs")
"""Options with the same meaning in chat completions."""
ROLES = ("user", "assistant", "system")  # tuples, not sets: the value in a request may be a list, which has no hash
SERVER_SEARCHES = ("web_search_20", "web_fetch_20")
"""Beginnings of the types of tools that read the web on Anthropic's servers. No engine has them; they are left out."""
THINKING_TYPES: Mapping[str, bool | None] = {"adaptive": None, "enabled": True, "disabled": False}
"""Values of ``thinking.type``, each with the value of ``enable_thinking``. None: the model decides."""


class AnthropicProtocol(Protocol):
    """Translation of the route ``/v1/messages``."""

    prefix = "msg_"
    field_names = MappingProxyType({"reasoning_effort": "output_config.effort", "max_completion_tokens": "max_tokens"})

    def request(self, body: Mapping[str, Any]) -> EngineRequest:
        chat = begin_chat(body, PASSED, "output_config")
        tools, deferred = _tools(body)
        chat |= {"messages": _messages(body, deferred), **_switches(body)}
        if body.get("max_tokens") is not None:
            chat["max_completion_tokens"] = body["max_tokens"]
        if stops := as_list(body.get("stop_sequences"), "stop_sequences"):
            chat["stop"] = stops
        if tools:
            chat["tools"] = tools
            choice = as_object(body.get("tool_choice"), "tool_choice") or {"type": "auto"}
            if choice.get("disable_parallel_tool_use"):
                chat["parallel_tool_calls"] = False
            named = {"type": "function", "function": {"name": choice.get("name")}}
            chat["tool_choice"] = {"auto": "auto", "none": "none", "any": "required"}.get(
                str(choice.get("type")), named
            )
        return EngineRequest(CHAT, chat, bool(body.get("stream")))

    def answer(self, answer: Mapping[str, Any], call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        prompt, sampled = usage_of(answer)
        text, thoughts = message.get("content"), thoughts_of(message)
        content: list[dict[str, Any]] = [_thinking(thoughts, body)] if thoughts else []
        content += [{"type": "text", "text": text}] if text else []
        content += [_tool_use(tool_call) for tool_call in message.get("tool_calls") or ()]
        return {
            **_message(call, body, prompt),
            "content": content,
            **_ending(choice),
            "usage": {"input_tokens": prompt, "output_tokens": sampled},
        }

    def events(self, call: str, body: Mapping[str, Any]) -> AnthropicEvents:
        return AnthropicEvents(call, body)

    def error(self, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
        return _error(message, kind)


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicEvents(Events):
    """Builds the events of a streamed message: blocks of thoughts and text as they come, then a block per tool call."""

    def __init__(self, call: str, body: Mapping[str, Any]) -> None:
        self._call, self._body = call, body
        self._blocks = 0
        """Number of blocks that are complete."""
        self._open, self._thoughts = "", list[str]()
        """Type of the open block, and the pieces of its thoughts."""
        self._has_begun = False

    def opening(self) -> list[bytes]:
        return []  # message_start needs the prompt length, which comes with the first chunk

    def of(self, chunk: Mapping[str, Any]) -> list[bytes]:
        events = self._begin(len(chunk.get("prompt_token_ids") or ()))
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue
            delta = choice.get("delta") or {}
            if thoughts := thoughts_of(delta):
                events += self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                self._thoughts.append(thoughts)
                if not _omits_thoughts(self._body):
                    events.append(self._delta({"type": "thinking_delta", "thinking": thoughts}))
            if piece := delta.get("content"):
                events += self._open_block({"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": piece}))
        return events

    def closing(self, answer: Mapping[str, Any]) -> list[bytes]:
        choice = answer["choices"][0]
        events = [*self._begin(usage_of(answer)[0]), *self._close_block()]
        for tool_call in (choice.get("message") or {}).get("tool_calls") or ():
            used = _tool_use(tool_call)
            events += self._open_block({**used, "input": {}})
            events.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(used["input"])}))
            events += self._close_block()
        usage = {"output_tokens": usage_of(answer)[1]}
        events.append(named_event({"type": "message_delta", "delta": _ending(choice), "usage": usage}))
        return [*events, named_event({"type": "message_stop"})]

    def failed(self, message: str, kind: str) -> list[bytes]:
        return [named_event(_error(message, kind))]

    def _open_block(self, block: Mapping[str, Any]) -> list[bytes]:
        """Return the events after which a block of this type is open."""
        if self._open == block["type"]:
            return []
        events = self._close_block()
        self._open = block["type"]
        return [*events, named_event({"type": "content_block_start", "index": self._blocks, "content_block": block})]

    def _close_block(self) -> list[bytes]:
        if not self._open:
            return []
        events = []
        if self._open == "thinking":
            signature = _thinking("".join(self._thoughts), self._body)["signature"]
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        events.append(named_event({"type": "content_block_stop", "index": self._blocks}))
        self._blocks += 1
        self._open, self._thoughts = "", []
        return events

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _begin(self, prompt: int) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [named_event({"type": "message_start", "message": _message(self._call, self._body, prompt)})]


def _ending(choice: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the stop reason of an answer, and the stop sequence that ended it."""
    reason, stop = str(choice.get("finish_reason")), choice.get("stop_reason")
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _message(call: str, body: Mapping[str, Any], prompt: int) -> dict[str, Any]:
    return {
        "id": call,
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": 0},
    }


def _messages(body: Mapping[str, Any], deferred: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``system`` and ``messages`` as chat messages."""
    chat_messages: list[dict[str, Any]] = []
    if system := text_of_parts(body.get("system"), ("text",), "system"):
        chat_messages.append({"role": "system", "content": system})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages is {messages!r:.80}, wanted a list of messages", "messages")
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise BadRequest(f"{where}.role is {role!r:.80}, wanted user or assistant", where)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise BadRequest(f"{where}.content is a {type(content).__name__}, wanted text or a list of blocks", where)
        chat_messages += _of_one(message["role"], parts, f"{where}.content", deferred)
    return chat_messages


def _of_one(role: str, parts: list[Any], where: str, deferred: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages for the blocks of a single message. Each tool result becomes a message of its own."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            texts.append(str(part.get("text") or ""))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _result_text(part.get("content"), f"{where}.{number}.content", deferred)
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts.append(_thoughts_in(part, f"{where}.{number}"))
        else:
            raise BadRequest(
                f"{where}.{number} is of type {kind!r}; taken are text, thinking, tool_use and tool_result", where
            )
    text = "".join(texts)
    if role == "assistant":
        message = assistant_message(text or None, thoughts)
        return [{**message, "tool_calls": calls} if calls else message]
    return [*results, *([{"role": role, "content": text}] if text or not results else [])]


def _result_text(content: Any, where: str, deferred: Mapping[str, Any]) -> str:
    """Return the text of a tool result. References to tools, which a search found, become the tools' definitions.

    Raises:
        BadRequest: The result contains a part that is neither text nor a reference, or a reference to an unknown tool.
    """
    parts = content if isinstance(content, list) else []
    names = [part.get("tool_name") for part in parts if isinstance(part, dict) and part.get("type") == "tool_reference"]
    if not names:
        return text_of_parts(content, ("text",), where)
    functions = []
    for name in names:
        if not isinstance(name, str) or name not in deferred:
            raise BadRequest(f"{where} refers to the tool {name!r:.80}, which is not in tools", where)
        functions.append(deferred[name])
    texts = [part for part in parts if not isinstance(part, dict) or part.get("type") != "tool_reference"]
    return text_of_parts(texts, ("text",), where) + definitions(functions)


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the offered tools, and by name all tools that a search may refer to. A tool with ``defer_loading`` is not
    offered.
    """
    offered, functions = [], {}
    for number, tool in enumerate(as_list(body.get("tools"), "tools")):
        if _is_server_search(tool):
            continue
        function = _tool(number, tool)
        functions[function["function"]["name"]] = function["function"]
        if not tool.get("defer_loading"):
            offered.append(function)
    return offered, functions


def _is_server_search(tool: Any) -> bool:
    """Return whether a tool is a search on Anthropic's servers, which a model may always do without."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(SERVER_SEARCHES)


def _switches(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``thinking`` and ``output_config.effort`` as fields of a chat completion. ``budget_tokens`` is a target
    that the model may miss, so nothing enforces it.
    """
    thinking = as_object(body.get("thinking"), "thinking")
    kind = thinking.get("type", "adaptive")
    if not isinstance(kind, str) or kind not in THINKING_TYPES:
        raise BadRequest(f"thinking.type is {kind!r:.80}, wanted {' or '.join(THINKING_TYPES)}", "thinking.type")
    enabled, effort = THINKING_TYPES[kind], as_object(body.get("output_config"), "output_config").get("effort")
    if enabled is False:  # an effort only limits thoughts
        effort = None
    fields = {"enable_thinking": enabled, "reasoning_effort": effort}
    return {name: value for name, value in fields.items() if value is not None}


def _omits_thoughts(body: Mapping[str, Any]) -> bool:
    return as_object(body.get("thinking"), "thinking").get("display") == "omitted"


def _thinking(thoughts: str, body: Mapping[str, Any]) -> dict[str, str]:
    """Return a block of thoughts. If the client omits thoughts, the signature holds them, so that the client sends them
    back.
    """
    if _omits_thoughts(body):
        return {"type": "thinking", "thinking": "", "signature": seal_thoughts(thoughts)}
    # clients drop a block without a signature
    return {
        "type": "thinking",
        "thinking": thoughts,
        "signature": hashlib.sha256(as_json(thoughts).encode()).hexdigest(),
    }


def _thoughts_in(block: Mapping[str, Any], where: str) -> str:
    """Return the thoughts in a block of an earlier answer. Thoughts that another server sealed are left out."""
    name, seal = ("thinking", "signature") if block["type"] == "thinking" else ("data", "data")
    text = block.get(name)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{name} is a {type(text).__name__}, wanted text", f"{where}.{name}")
    return (text if name == "thinking" else "") or unseal_thoughts(block.get(seal))


def _tool(number: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise BadRequest(f"tools.{number} is {tool!r:.80}, wanted a name and an input_schema", f"tools.{number}")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = parsed_arguments(function.get("arguments") or "{}")
    tool_input = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    name = call.get("id") or f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": name, "name": function.get("name"), "input": tool_input}
