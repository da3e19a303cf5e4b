"""Reassembles streamed completions: server-sent events into chunks, chunks into one answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.messages.msgpack_scan import repair_surrogates

THOUGHTS = ("reasoning_content", "reasoning")
"""Names of the thoughts in messages and deltas of chat completions. Newer servers of vLLM use the second name."""
MAX_EVENT = 1 << 24
"""Maximum bytes of one event. A server that sends more without an end does not send an event stream."""


class EventReader:
    """Takes bytes as they arrive and returns the JSON of each complete event (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[Any]:
        """Return the JSON of the events that end in ``piece``.

        Raises:
            ValueError: An event is not JSON, or does not end.
        """
        events: list[Any] = []
        *lines, self._line = (self._line + piece).split(b"\n")
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                if data != b"[DONE]":
                    events.append(json.loads(data))
        if len(self._line) + sum(map(len, self._data)) > MAX_EVENT:
            raise ValueError(f"an event of the stream is over {MAX_EVENT} bytes")
        return events


class SurrogateRepairer:
    """Repairs the texts of one stream's chunks. A server that cuts its text in UTF-16 can split a surrogate pair over
    two chunks, and no message can hold either half.
    """

    def __init__(self) -> None:
        self._halves: dict[tuple[int, str], str] = {}
        """First half of a pair at the end of the latest piece, by choice and name of the text."""

    def mend(self, chunk: Mapping[str, Any]) -> None:
        """Repair the texts in each choice of a chunk; a first half at the end of a text moves to the next chunk."""
        for choice in chunk.get("choices") or ():
            for name in ("text",) if "text" in choice else ("content", *THOUGHTS):
                self._mend_text(choice if name == "text" else choice.get("delta") or {}, name, choice)

    def _mend_text(self, holder: dict[str, Any], name: str, choice: Mapping[str, Any]) -> None:
        piece, place = holder.get(name), (choice.get("index") or 0, name)
        if not isinstance(piece, str) or (piece.isascii() and place not in self._halves):
            return
        piece = self._halves.pop(place, "") + piece
        if "\ud800" <= piece[-1:] <= "\udbff" and choice.get("finish_reason") is None:
            self._halves[place], piece = piece[-1], piece[:-1]
        holder[name] = repair_surrogates(piece)


LATEST = ("finish_reason", "stop_reason", "response_text", "malformed_calls", "prompt_token_ids", "prompt_text")
"""Fields of a choice. The latest value of each field counts."""


@dataclass(slots=True)
class _Choice:
    """Assembles the pieces of one choice from their chunks."""

    token_ids: list[int] | None = None
    """None: no chunk had token ids."""
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[Sequence[int]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    """Pieces of the content, or of the text of a text completion."""
    thoughts: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Tool calls by their index."""
    is_text: bool = False
    """True for a text completion."""
    latest: dict[str, Any] = field(default_factory=lambda: {"finish_reason": None})
    """Values of the fields :data:`LATEST`."""

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add the choice of one chunk."""
        if (ids := piece.get("token_ids")) is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += ids
        self.logprobs += numbers(piece) or ()
        for run in piece.get("weight_versions") or ():
            # weights that changed before a token came replace the version with which the choice began
            self.versions = [row for row in self.versions if row[0] < run[0]] + [run]
        self.is_text |= "text" in piece
        delta = piece.get("delta") or {}
        self.written.append(piece.get("text") or delta.get("content") or "")
        self.thoughts.append(thoughts_of(delta))
        for call in delta.get("tool_calls") or ():
            new_call = {"type": "function", "function": {"name": "", "arguments": ""}}
            whole = self.calls.setdefault(call.get("index") or 0, new_call)
            if call.get("id"):
                whole["id"] = call["id"]
            for name in whole["function"]:
                whole["function"][name] += (call.get("function") or {}).get(name) or ""
        self.latest |= {name: piece[name] for name in LATEST if piece.get(name) is not None}

    @property
    def has_begun(self) -> bool:
        """Whether the choice has a token, or, without token ids, a text or a call."""
        if self.token_ids is not None:
            return bool(self.token_ids)
        return any(self.written) or any(self.thoughts) or bool(self.calls)

    def whole(self) -> dict[str, Any]:
        """Return the choice in the form of an unstreamed answer. Later chunks do not change the result."""
        choice: dict[str, Any] = {
            "token_ids": None if self.token_ids is None else list(self.token_ids),
            "token_logprobs": list(self.logprobs),
            "weight_versions": self.versions,
            **self.latest,
        }
        written, thoughts = "".join(self.written), "".join(self.thoughts)
        if self.is_text:
            return {**choice, "text": written}
        calls = [{**call, "function": dict(call["function"])} for _, call in sorted(self.calls.items())]
        message: dict[str, Any] = {"content": written, "tool_calls": calls}
        return {**choice, "message": message | ({"reasoning_content": thoughts} if thoughts else {})}


class AnswerAssembler:
    """Assembles the chunks of a stream to an answer in the form of an unstreamed answer. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add one chunk."""
        with self._lock:
            for name in ("prompt_token_ids", "prompt_text", "weight_version"):
                if chunk.get(name) is not None:
                    self._answer[name] = chunk[name]
            for piece in chunk.get("choices") or ():
                self._choices.setdefault(piece.get("index") or 0, _Choice()).add(piece)

    def answer(self) -> dict[str, Any]:
        """Return the answer so far, without choices that have not begun."""
        with self._lock:
            choices = [choice.whole() for _, choice in sorted(self._choices.items()) if choice.has_begun]
            return {**self._answer, "choices": choices}


def numbers(choice: Mapping[str, Any]) -> list[float | None] | None:
    """Return the logprobs of a choice, or of a part of a choice, from any form that servers use. None stands for a
    missing logprob.
    """
    logprobs = choice.get("logprobs") or {}
    values: list[float | None] | None = choice.get("token_logprobs")
    if values is None:
        values = logprobs.get("token_logprobs")  # text completions
    if values is None and logprobs.get("content") is not None:  # chat completions
        values = [entry["logprob"] for entry in logprobs["content"]]
    return values


def thoughts_of(message: Mapping[str, Any]) -> str:
    """Return the thoughts in a message or a delta of a chat completion; an empty text if it does not hold thoughts."""
    return next((message[name] for name in THOUGHTS if isinstance(message.get(name), str) and message[name]), "")


def malformed_calls_of(choice: Mapping[str, Any]) -> int:
    """Return the number of tool calls that begin in a choice and that the engine could not read."""
    count = choice.get("malformed_calls")
    return count if type(count) is int and count > 0 else 0


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice: ``response_text`` if the engine sent it, else the content of the choice, with the
    tool calls that a server moved out of it but without the thoughts that a server moved out of it.
    """
    return repair_surrogates(_text_of(choice))


def _text_of(choice: Mapping[str, Any]) -> str:
    if choice.get("response_text") is not None:
        return str(choice["response_text"])
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    content, calls = message.get("content") or "", message.get("tool_calls")
    if not calls and type(content) is str:
        return content
    return "".join([content, *map(_call_text, calls or ())])


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    name, arguments = json.dumps(function.get("name")), function.get("arguments") or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
