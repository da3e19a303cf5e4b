"""Anthropic's Messages API on top of chat completions.

Source of the format: Anthropic API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from trinity_mq.gateway.protocols.base import (
    BadRequest,
    EngineRequest,
    Events,
    Protocol,
    as_list,
    as_object,
    check_options,
    named_event,
    response_format,
    text_of_parts,
    usage_of,
)
from trinity_mq.gateway.protocols.openai import CHAT

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
PASSED = ("temperature", "top_p", "return_token_ids")
"""Options with the same meaning in chat completions."""
ROLES = ("user", "assistant", "system")  # tuples, not sets: the value in a request may be a list, which has no hash
HIDDEN = ("thinking", "redacted_thinking")
"""Block types with the reasoning of another model. They are not passed to this model."""


class AnthropicProtocol(Protocol):
    """``/v1/messages``."""

    prefix = "msg_"

    def request(self, body: Mapping[str, Any]) -> EngineRequest:
        check_options(body, PASSED)
        form = as_object(as_object(body.get("output_config"), "output_config").get("format"), "output_config.format")
        chat: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
        chat |= {"model": body.get("model"), "messages": _messages(body)}
        chat |= response_format(form, "output_config.format")
        if body.get("max_tokens") is not None:
            chat["max_completion_tokens"] = body["max_tokens"]
        if stops := as_list(body.get("stop_sequences"), "stop_sequences"):
            chat["stop"] = stops
        if tools := [_tool(number, tool) for number, tool in enumerate(as_list(body.get("tools"), "tools"))]:
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
        text = message.get("content")
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
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
        return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicEvents(Events):
    """Events of a streamed message: a text block, then a block per tool call."""

    def __init__(self, call: str, body: Mapping[str, Any]) -> None:
        self._call, self._body = call, body
        self._blocks = 0
        self._is_open = self._has_begun = False

    def opening(self) -> list[bytes]:
        return []  # message_start needs the prompt length, which comes with the first chunk

    def of(self, chunk: Mapping[str, Any]) -> list[bytes]:
        events = self._begin(len(chunk.get("prompt_token_ids") or ()))
        for choice in chunk.get("choices") or ():
            piece = (choice.get("delta") or {}).get("content")
            if not piece or choice.get("index"):
                continue
            if not self._is_open:
                self._is_open = True
                block = {"type": "text", "text": ""}
                events.append(named_event({"type": "content_block_start", "index": 0, "content_block": block}))
            delta = {"type": "text_delta", "text": piece}
            events.append(named_event({"type": "content_block_delta", "index": 0, "delta": delta}))
        return events

    def closing(self, answer: Mapping[str, Any]) -> list[bytes]:
        choice = answer["choices"][0]
        events = self._begin(usage_of(answer)[0])
        if self._is_open:
            events.append(named_event({"type": "content_block_stop", "index": 0}))
            self._blocks = 1
        for tool_call in (choice.get("message") or {}).get("tool_calls") or ():
            used, place = _tool_use(tool_call), self._blocks
            block = {**used, "input": {}}
            events.append(named_event({"type": "content_block_start", "index": place, "content_block": block}))
            delta = {"type": "input_json_delta", "partial_json": json.dumps(used["input"])}
            events.append(named_event({"type": "content_block_delta", "index": place, "delta": delta}))
            events.append(named_event({"type": "content_block_stop", "index": place}))
            self._blocks += 1
        usage = {"output_tokens": usage_of(answer)[1]}
        events.append(named_event({"type": "message_delta", "delta": _ending(choice), "usage": usage}))
        return [*events, named_event({"type": "message_stop"})]

    def failed(self, message: str, kind: str) -> list[bytes]:
        return [named_event({"type": "error", "error": {"type": kind, "message": message}})]

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


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        chat_messages += _of_one(message["role"], parts, f"{where}.content")
    return chat_messages


def _of_one(role: str, parts: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the chat messages for the blocks of a single message. Each tool result becomes a message of its own."""
    texts: list[str] = []
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
            text = text_of_parts(part.get("content"), ("text",), f"{where}.{number}.content")
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif kind not in HIDDEN:
            raise BadRequest(f"{where}.{number} is of type {kind!r}; taken are text, tool_use and tool_result", where)
    text = "".join(texts)
    if role == "assistant":
        return [{"role": role, "content": text or None, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": text}] if text or not results else [])]


def _tool(number: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise BadRequest(f"tools.{number} is {tool!r:.80}, wanted a name and an input_schema", f"tools.{number}")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = function.get("arguments")
    tool_input = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    name = call.get("id") or f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": name, "name": function.get("name"), "input": tool_input}
