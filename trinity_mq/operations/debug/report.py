"""Reports of ``trinity-mq debug``, including the calls to the engine: text for a person, or JSON lines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody
from trinity_mq.observability.experiences.show_experience import (
    as_json,
    line,
    open_console,
    print_experience,
    print_title,
    role_and_text,
)
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.operations.debug.errors import WorkflowFailure
from trinity_mq.operations.debug.proxy import ProxiedCall
from trinity_mq.scheduling import Status
from trinity_mq.telemetry.jsonline import dump_line

if TYPE_CHECKING:
    from rich.console import Console

    from trinity_mq.operations.debug.proxy import ProxiedCall

ASKED = ("messages", "prompt", "tokens", "model", "return_token_ids", "tools")
"""Fields of a request that are not sampling parameters."""


class JsonReport:
    """Writes one JSON object per line, each with an ``event``: task, call, experience or end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def task(self, number: int, body: TaskBody) -> None:
        """Write the task in its published form."""
        self._write("task", {"number": number, "task": body.model_dump(mode="json")})

    def call(self, call: ProxiedCall, texts: TokenTexts) -> None:
        """Write request and answer."""
        self._write("call", call_json(call, texts))

    def experience(self, experience: Experience, texts: TokenTexts) -> None:
        """Write all fields of the experience."""
        self._write("experience", as_json(experience, texts))

    def end(self, status: Status, calls: int, failure: WorkflowFailure | None) -> None:
        """Write the status, message and metrics of the rollout, the number of calls, and the error."""
        error = None if failure is None else dataclasses.asdict(failure)
        metrics = status.metrics[0] if status.metrics else {}
        self._write(
            "end", {"ok": status.ok, "message": status.message, "metrics": metrics, "calls": calls, "error": error}
        )

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        self._out.write(dump_line({"event": event, **fields}) + "\n")
        self._out.flush()


class TextReport:
    """Prints the report for a person."""

    def __init__(self, out: TextIO) -> None:
        self._console = open_console(out)

    def task(self, number: int, body: TaskBody) -> None:
        """Print the task."""
        print_title(self._console, f"task {number}: {body.workflow}", "green")
        for name, value in body.raw_task.items():
            self._line(name, value if isinstance(value, str) else json.dumps(value, default=repr))
        for name in ("reward_fn", "reward_fn_args", "workflow_args", "rollout_args"):
            if value := getattr(body, name):
                self._line(name, str(value))

    def call(self, call: ProxiedCall, texts: TokenTexts) -> None:
        """Print request and answer."""
        show_call(self._console, call, texts)

    def experience(self, experience: Experience, texts: TokenTexts) -> None:
        """Print the experience, token by token."""
        print_experience(self._console, experience, texts)

    def end(self, status: Status, calls: int, failure: WorkflowFailure | None) -> None:
        """Print the status, message and metrics of the rollout, the number of calls, and the error."""
        print_title(self._console, "finished" if status.ok else "failed", "green" if status.ok else "red")
        self._line("calls", str(calls))
        for name, value in (status.metrics[0] if status.metrics else {}).items():
            is_number = isinstance(value, int | float)  # a workflow may have set anything
            self._line("metric", f"{name} = {value:g}" if is_number else f"{name} = {value!r}, which is not a number")
        if status.message:
            self._line("message", status.message)
        if failure is not None:
            verb = "was at" if failure.was_interrupted else "failed at"
            self._line(verb, f"{failure.file}:{failure.line} in {failure.function}")
            self._line("", failure.traceback)

    def _line(self, name: str, value: str) -> None:
        line(self._console, name, value)


Report = JsonReport | TextReport


@dataclass
class AnswerChoice:
    """One choice of an answer, complete or assembled from a stream."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """Token texts, if the server sent them."""
    tool_calls: list[Any] = field(default_factory=list)


def choices(answer: Any) -> list[AnswerChoice]:
    """Return the choices of an answer: the JSON of a completion, or the events of a stream."""
    by_index: dict[int, AnswerChoice] = {}
    for event in answer if isinstance(answer, list) else [answer]:
        for part in _list(_mapping(event).get("choices")):
            index = _mapping(part).get("index")
            _add(by_index.setdefault(index if isinstance(index, int) else 0, AnswerChoice()), _mapping(part))
    return [by_index[index] for index in sorted(by_index)]


def _add(choice: AnswerChoice, part: Mapping[str, Any]) -> None:
    """Add ``part``, a choice in a complete answer or in an event of a stream, to ``choice``. Malformed fields are
    skipped.
    """
    message, listed = _mapping(part.get("message") or part.get("delta")), _mapping(part.get("logprobs"))
    content = [_mapping(token) for token in _list(listed.get("content"))]
    choice.text += str(part.get("text") or message.get("content") or "")
    choice.tool_calls += _list(message.get("tool_calls"))
    choice.finish_reason = part.get("finish_reason") or choice.finish_reason
    choice.token_ids += [token for token in _list(part.get("token_ids")) if isinstance(token, int)]
    choice.pieces += [str(token.get("token")) for token in content] or list(map(str, _list(listed.get("tokens"))))
    logprobs = _list(part.get("token_logprobs")) or [token.get("logprob") for token in content]
    logprobs = logprobs or _list(listed.get("token_logprobs"))
    choice.logprobs += [logprob if isinstance(logprob, int | float) else math.nan for logprob in logprobs]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def call_json(call: ProxiedCall, texts: TokenTexts) -> dict[str, Any]:
    """Return a call with its original request and answer, and the answer's choices with token texts."""
    return {
        "number": call.number,
        "engine": call.engine or None,
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "seconds": round(call.seconds, 6),
        "stream": call.is_stream,
        "error": call.error or None,
        "request": call.request,
        "answer": call.answer,
        "choices": [
            {
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "tool_calls": choice.tool_calls,
                "tokens": choice.token_ids,
                "token_texts": _texts(choice, texts),
                "logprobs": choice.logprobs,
            }
            for choice in choices(call.answer)
        ],
    }


def show_call(console: Console, call: ProxiedCall, texts: TokenTexts) -> None:
    """Print a call."""
    outcome = str(call.status) if call.status else "no answer"
    stream, whom = " stream" if call.is_stream else "", f" to {call.engine}" if call.engine else ""
    words = f"call {call.number}{whom}: {call.method} {call.path} {outcome}{stream} {call.seconds:.3f} s"
    print_title(console, words, "blue")
    for name, text in (*_asked(call.request), *_answered(call, texts)):
        line(console, name, text)


def _asked(request: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(request, dict):
        return
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield role_and_text(message) if isinstance(message, dict) else ("?", repr(message))
    for name in ("prompt", "tokens", "tools"):
        if request.get(name):
            yield name, request[name] if isinstance(request[name], str) else json.dumps(request[name])
    settings = {name: value for name, value in request.items() if name not in ASKED and value is not None}
    if settings:
        yield "sampling", " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def _answered(call: ProxiedCall, texts: TokenTexts) -> Iterator[tuple[str, str]]:
    if call.error:
        yield "error", call.error
    answers = choices(call.answer)
    for number, choice in enumerate(answers):
        name = "answer" if len(answers) == 1 else f"answer {number}"
        calls = f" calls {json.dumps(choice.tool_calls, ensure_ascii=False)}" if choice.tool_calls else ""
        yield name, f"{choice.text}{calls}   ({choice.finish_reason}, {len(choice.token_ids)} tokens)"
        if choice.token_ids or choice.pieces:
            yield "tokens", " ".join(_sampled(choice, texts))
    if not answers and call.answer is not None:
        failed = call.answer.get("error") if isinstance(call.answer, dict) else None
        words = failed.get("message") if isinstance(failed, dict) else failed
        yield ("error", str(words)) if words else ("answer", json.dumps(call.answer))


def _sampled(choice: AnswerChoice, texts: TokenTexts) -> Iterator[str]:
    """Yield id, text and logprob of each token as a text, for example ``9'7':-0.4120``."""
    pieces = _texts(choice, texts)
    for place, text in enumerate(pieces):
        token = str(choice.token_ids[place]) if place < len(choice.token_ids) else ""
        logprob = choice.logprobs[place] if place < len(choice.logprobs) else None
        yield f"{token}{'' if text is None else repr(text)}" + ("" if logprob is None else f":{logprob:.4f}")


def _texts(choice: AnswerChoice, texts: TokenTexts) -> Sequence[str | None]:
    return choice.pieces if choice.pieces else texts.of(choice.token_ids)
