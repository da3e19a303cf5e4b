"""OpenAI's Responses API on top of chat completions.

Source of the format: OpenAI API reference, "Responses" and "Streaming events". A request sends the whole
conversation in ``input``, as agent frameworks do, or only the items after the response ``previous_response_id``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trinity_mq.gateway.protocols.base import (
    BadRequest,
    EngineRequest,
    Events,
    Protocol,
    as_list,
    as_object,
    assistant_message,
    begin_chat,
    check_neutral,
    named_event,
    seal_thoughts,
    text_of_parts,
    unseal_thoughts,
    usage_of,
)
from trinity_mq.gateway.protocols.openai import CHAT
from trinity_mq.gateway.protocols.response_tools import (
    CALLS,
    OUTPUTS,
    SEARCH_OUTPUT,
    ResponseTools,
    call_events,
    call_of_item,
)
from trinity_mq.models.recording.sse import thoughts_of

PARTS = ("input_text", "output_text", "text")
PASSED = (
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "user",
    "metadata",
    "return_token_ids",
    "top_logprobs",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop",
    "chat_template_kwargs",
)
"""Options with the same meaning in chat completions."""
REASONING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "context": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}
"""Options of ``reasoning`` without a counterpart here, with their neutral values. Nobody summarises thoughts here."""
SEALED_REASONING = "reasoning.encrypted_content"
"""Entry of ``include`` that requests the thoughts in the form that clients send back unread."""


PREVIOUS = "previous_response_id"
LOGPROBS = "message.output_text.logprobs"
"""Entry of ``include`` that requests the logprobs of the text."""


class ResponsesProtocol(Protocol):
    """Translation of the route ``/v1/responses``."""

    prefix = "resp_"
    field_names = MappingProxyType(
        {"reasoning_effort": "reasoning.effort", "max_completion_tokens": "max_output_tokens"}
    )

    def request(self, body: Mapping[str, Any]) -> EngineRequest:
        previous, stores = body.get("previous_response_id") or "", body.get("store")
        if not isinstance(previous, str):
            raise BadRequest(f"previous_response_id is {previous!r:.80}, wanted the id of a response", PREVIOUS)
        if stores not in (None, False, True):
            raise BadRequest(f"store is {stores!r:.80}, wanted true or false", "store")
        if body.get("conversation") is not None:
            raise BadRequest(
                "conversation names a stored conversation, and there are none here: send previous_response_id, or the "
                "whole conversation in input",
                "conversation",
            )
        chat, tools = begin_chat(body, PASSED, "text"), ResponseTools(body)
        chat |= {"messages": _messages(body, tools), **_effort(body)}
        if body.get("max_output_tokens") is not None:
            chat["max_completion_tokens"] = body["max_output_tokens"]
        if tools.functions:
            chat["tools"] = tools.functions
            chat["tool_choice"] = tools.choice(body.get("tool_choice", "auto"))
        else:
            chat.pop("parallel_tool_calls", None)  # without tools it changes nothing
        return EngineRequest(
            CHAT,
            chat,
            bool(body.get("stream")),
            _asks_logprobs(body),
            previous=previous,
            unstored=int(bool(body.get("instructions"))),
            stores=stores is not False,
        )

    def answer(self, answer: Mapping[str, Any], call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        choice, events = answer["choices"][0], ResponsesEvents(call, body)
        events.of({"choices": [{"delta": choice.get("message") or {}, "logprobs": choice.get("logprobs")}]})
        events.closing(answer)
        return events.response

    def events(self, call: str, body: Mapping[str, Any]) -> ResponsesEvents:
        return ResponsesEvents(call, body)


class ResponsesEvents(Events):
    """Builds the events of a streamed response, and the whole response: reasoning and messages with their text in
    deltas, then the tool calls.
    """

    def __init__(self, call: str, body: Mapping[str, Any]) -> None:
        self._call, self._body = call, body
        self._number = 0
        self._done: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: dict[str, Any] | None = None
        """The item whose text arrives."""
        self._text: list[str] = []
        """Pieces of the text of the open item."""
        self._logprobs: list[Any] = []
        """Logprobs of the tokens whose text has been sent."""
        self._news: list[Any] = []
        """Logprobs of the tokens whose text is not final yet."""
        self.response: dict[str, Any] = {}
        """The whole response, after :meth:`closing`."""

    def opening(self) -> list[bytes]:
        response = _response(self._call, self._body, [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def of(self, chunk: Mapping[str, Any]) -> list[bytes]:
        events = []
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue
            self._news += _logprobs(choice, self._body)
            delta = choice.get("delta") or {}
            if thoughts := thoughts_of(delta):
                events += self._open_item("reasoning")
                self._text.append(thoughts)
                events.append(self._part("response.reasoning_text.delta", delta=thoughts))
            if piece := delta.get("content"):
                events += self._open_item("message")
                self._text.append(piece)
                events.append(self._part("response.output_text.delta", delta=piece, logprobs=self._news))
                self._logprobs += self._news
                self._news = []
        return events

    def closing(self, answer: Mapping[str, Any]) -> list[bytes]:
        message = answer["choices"][0].get("message") or {}
        self._logprobs += self._news
        events = self._close_item()
        nothing = _message(_item_id("msg", self._call), "", "completed", self._logprobs)
        output = [*self._done, *_calls(message, self._body)] or [nothing]
        for place, item in enumerate(output):
            if item["type"] in CALLS:
                events += [self._event(kind, output_index=place, **fields) for kind, fields in call_events(item)]
        self.response = _response(self._call, self._body, output, answer)
        kind = "response.completed" if self.response["status"] == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=self.response)]

    def failed(self, message: str, kind: str) -> list[bytes]:
        return [self._event("error", message=message, code=kind, param=None)]

    def _open_item(self, kind: str) -> list[bytes]:
        """Return the events after which an item of this type is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events, place = self._close_item(), len(self._done)
        if kind == "reasoning":
            item, part = _reasoning(_item_id("rs", self._call, place), "", self._body, "in_progress"), _thought_part("")
        else:
            item, part = _message(_item_id("msg", self._call, place), "", "in_progress"), _text_part("")
        self._open, self._text = item, []
        events.append(self._event("response.output_item.added", output_index=place, item={**item, "content": []}))
        return [*events, self._part("response.content_part.added", part=part)]

    def _close_item(self) -> list[bytes]:
        if self._open is None:
            return []
        name, text, logprobs = self._open["id"], "".join(self._text), self._logprobs
        if self._open["type"] == "reasoning":
            item, ended = _reasoning(name, text, self._body), self._part("response.reasoning_text.done", text=text)
        else:
            item = _message(name, text, "completed", logprobs)
            ended = self._part("response.output_text.done", text=text, logprobs=logprobs)
            self._logprobs = []
        part = self._part("response.content_part.done", part=item["content"][0])
        done = self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None
        return [ended, part, done]

    def _part(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})


def _messages(body: Mapping[str, Any], tools: ResponseTools) -> list[dict[str, Any]]:
    """Return ``instructions`` and ``input`` as chat messages."""
    chat_messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # of the assistant's next message
    if instructions := body.get("instructions"):
        chat_messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        return [*chat_messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest(f"input is {items!r:.80}, wanted text or a list of items", "input")
    for number, item in enumerate(items):
        where = f"input.{number}"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} is a {type(item).__name__}, wanted an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            text = text_of_parts(item.get("content"), PARTS, f"{where}.content")
            if role == "assistant":
                chat_messages.append(_answered(text, thoughts))
            else:
                chat_messages += [*_unanswered(thoughts), {"role": role, "content": text}]
        elif kind in CALLS:
            # text and calls came from the same answer, unless thoughts stand between them
            if thoughts or not chat_messages or chat_messages[-1]["role"] != "assistant":
                chat_messages.append(_answered(None, thoughts))
            chat_messages[-1].setdefault("tool_calls", []).append(call_of_item(item))
        elif kind in OUTPUTS:
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _result(item, tools, where)}
            chat_messages += [*_unanswered(thoughts), result]
        elif kind == "reasoning":
            thoughts.append(_thoughts_in(item, where))
        else:
            raise BadRequest(
                f"{where} is of type {kind!r}; taken are message, reasoning, {', '.join(CALLS)} and their outputs",
                where,
            )
    return [*chat_messages, *_unanswered(thoughts)]


def _result(item: Mapping[str, Any], tools: ResponseTools, where: str) -> str:
    """Return the text of a tool's result."""
    if item["type"] == SEARCH_OUTPUT:
        return tools.found_tools(item, where)
    return text_of_parts(item.get("output"), PARTS, f"{where}.output")


def _answered(text: str | None, thoughts: list[str]) -> dict[str, Any]:
    """Return a message of the assistant with the ``thoughts`` before it, and clear the list of thoughts."""
    message = assistant_message(text, thoughts)
    thoughts.clear()
    return message


def _unanswered(thoughts: list[str]) -> list[dict[str, Any]]:
    """Return the message of an answer that ended within its thoughts. Empty: no thoughts are left."""
    return [_answered(None, thoughts)] if any(thoughts) else []


def _thoughts_in(item: Mapping[str, Any], where: str) -> str:
    """Return the thoughts in a reasoning item: its text, or the sealed text if the client dropped the text. Thoughts
    that another server sealed are left out.
    """
    text = text_of_parts(item.get("content"), ("reasoning_text", "text"), f"{where}.content")
    return text or unseal_thoughts(item.get("encrypted_content"))


def _effort(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``reasoning`` as fields of a chat completion."""
    reasoning = as_object(body.get("reasoning"), "reasoning")
    for name, neutral in REASONING_NEUTRAL.items():
        check_neutral(f"reasoning.{name}", reasoning.get(name), neutral)
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _item_id(kind: str, call: str, place: int = 0) -> str:
    """Return the id of an item of a response. An item at place 0 or 1 has an id without a number."""
    number = f"_{place}" if place > 1 else ""
    return f"{kind}_{call.removeprefix('resp_')}{number}"


def _asks_logprobs(body: Mapping[str, Any]) -> bool:
    return LOGPROBS in as_list(body.get("include"), "include")


def _logprobs(choice: Mapping[str, Any], body: Mapping[str, Any]) -> list[Any]:
    """Return the logprobs of a choice or of a chunk of it. The list is empty if the request did not ask for
    logprobs.
    """
    return list((choice.get("logprobs") or {}).get("content") or ()) if _asks_logprobs(body) else []


def _text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _message(name: str, text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    content = [_text_part(text, logprobs)]
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def _thought_part(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


def _reasoning(name: str, thoughts: str, body: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    item = {"id": name, "type": "reasoning", "status": status, "summary": [], "content": [_thought_part(thoughts)]}
    if SEALED_REASONING in as_list(body.get("include"), "include"):
        item["encrypted_content"] = seal_thoughts(thoughts)
    return item


def _calls(message: Mapping[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message as items."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    tools = ResponseTools(body)
    return [tools.item(call) for call in calls]


def _response(
    call: str, body: Mapping[str, Any], output: list[dict[str, Any]], answer: Mapping[str, Any] | None
) -> dict[str, Any]:
    cut = answer is not None and answer["choices"][0].get("finish_reason") == "length"
    status = "in_progress" if answer is None else "incomplete" if cut else "completed"
    prompt, sampled = (0, 0) if answer is None else usage_of(answer)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    return {
        "id": call,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or (answer or {}).get("model") or "",
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": as_object(body.get("reasoning"), "reasoning").get("effort"), "summary": None},
        "previous_response_id": body.get(PREVIOUS) or None,
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": ResponseTools(body).offered,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None if answer is None else usage,
    }
