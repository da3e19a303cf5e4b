"""Interface of the API translations, and helpers that they share."""

from __future__ import annotations

import base64
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trinity_mq.messages.msgpack_scan import repair_surrogates


class BadRequest(ValueError):
    """A request is invalid or cannot be translated. The message states the received value and the accepted values."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request in the format of the engines."""

    path: str
    """Route on the engine."""
    body: dict[str, Any]
    streams: bool
    """True if the agent asked for a streamed answer."""
    logprobs: bool = False
    """True if the agent asked for the logprob and the text of each token."""
    previous: str = ""
    """Id of the stored response whose conversation comes before ``messages``, but after their instructions. Empty: the
    request continues no stored response.
    """
    unstored: int = 0
    """Number of leading messages that are not stored with the response: instructions, and the conversation of
    ``previous``."""
    stores: bool = False
    """True if later requests may refer to the response by its id."""
    size: int = 0
    """Bytes of the agent's request, and of the stored responses that it continues."""


class Events(ABC):
    """Converts the chunks of a streamed chat completion to the events of an API."""

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Return the events to send before the first chunk."""

    @abstractmethod
    def of(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """Return the events for a chunk."""

    @abstractmethod
    def closing(self, answer: Mapping[str, Any]) -> list[bytes]:
        """Return the events to send after the last chunk. ``answer`` is the whole answer, in the format without
        streaming.
        """

    @abstractmethod
    def failed(self, message: str, kind: str) -> list[bytes]:
        """Return the event for an error during the stream."""


class Protocol(ABC):
    """Translation of a single API."""

    prefix: str
    """Prefix of the ids of its answers."""
    field_names: Mapping[str, str] = MappingProxyType({})
    """The API's names of request fields, by the names in chat completions, which the errors of engines contain."""

    def new_id(self) -> str:
        """Return a new id for an answer."""
        return f"{self.prefix}{uuid.uuid4().hex}"

    @abstractmethod
    def request(self, body: Mapping[str, Any]) -> EngineRequest:
        """Return the request for the engine.

        Raises:
            BadRequest: The request is invalid, or asks for a feature that no engine here has.
        """

    @abstractmethod
    def answer(self, answer: Mapping[str, Any], call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer in the format of the API.

        Args:
            answer: Answer of the engine.
            call: Id of the answer.
            body: Body of the agent's request.
        """

    @abstractmethod
    def events(self, call: str, body: Mapping[str, Any]) -> Events:
        """Return the converter for a streamed answer."""

    def error(self, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
        """Return the body of an error response, in the form of OpenAI's APIs."""
        return error_body(message, kind, param)


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response of OpenAI's APIs."""
    return {"error": {"message": message, "type": kind, "param": param, "code": kind}}


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return a part of a request that must be an object. A missing part becomes an empty object.

    Raises:
        BadRequest: The part has another type.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{where} is a {type(value).__name__}, wanted an object", where)
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """Return a part of a request that must be a list. A missing part becomes an empty list.

    Raises:
        BadRequest: The part has another type.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where} is a {type(value).__name__}, wanted a list", where)
    return value


CHANGE_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "output_format": (),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "stop": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Options of all APIs that change an answer, with their neutral values."""


def begin_chat(body: Mapping[str, Any], passed: Collection[str], holder: str) -> dict[str, Any]:
    """Return the first part of the chat completion request for a request of another API: its model, the options of the
    same meaning, and the form of the answer.

    Args:
        body: Body of the request.
        passed: Options with the same meaning in chat completions.
        holder: Option that holds the form of the answer under ``format``.

    Raises:
        BadRequest: The request has an option that would change its answer elsewhere and would be ignored here, or the
            form has an unknown type.
    """
    for name in CHANGE_SAMPLING.keys() & body.keys() - set(passed):
        check_neutral(name, body[name], CHANGE_SAMPLING[name])
    where = f"{holder}.format"
    form = as_object(as_object(body.get(holder), holder).get("format"), where)
    options = {name: body[name] for name in passed if body.get(name) is not None}
    return {"model": body.get("model"), **options, **_response_format(form, where)}


def check_neutral(name: str, value: Any, neutral: Sequence[Any]) -> None:
    """Check that an option without a counterpart here has no value, or a value that changes nothing.

    Raises:
        BadRequest: The option has another value.
    """
    if value is not None and value not in neutral:
        otherwise = f" (or send {' or '.join(map(json.dumps, neutral))})" if neutral else ""
        raise BadRequest(f"{name}={json.dumps(value)[:80]} is not supported; leave it out{otherwise}", name)


def _response_format(form: Mapping[str, Any], where: str) -> dict[str, Any]:
    match form.get("type", "text"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema" if isinstance(form.get("schema"), dict):
            described = {"name": str(form.get("name") or "answer"), "schema": form["schema"]}
            return {"response_format": {"type": "json_schema", "json_schema": described}}
    raise BadRequest(
        f"{where} is {json.dumps(form)[:80]}, wanted the type text, json_object, or json_schema with a schema", where
    )


def as_json(content: Any) -> str:
    """Return JSON that can be encoded as UTF-8. Answers of other servers may contain unpaired surrogates."""
    return repair_surrogates(json.dumps(content, ensure_ascii=False))


def data_event(content: Any) -> bytes:
    """Return a server-sent event without an event name."""
    return b"data: " + as_json(content).encode() + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose event name is its ``type``."""
    return f"event: {content['type']}\n".encode() + data_event(content)


SEALED = "tmq1."
"""Prefix of sealed thoughts. Clients return them unread, as a signature or as encrypted content."""


def seal_thoughts(thoughts: str) -> str:
    """Return thoughts as one opaque word. It is encoded, not encrypted."""
    return SEALED + base64.b64encode(repair_surrogates(thoughts).encode()).decode()


def unseal_thoughts(sealed: Any) -> str:
    """Return the thoughts in a word of :func:`seal_thoughts`. Empty: the word is of another server."""
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
    except ValueError:  # also raised if the bytes are not UTF-8
        return ""


def assistant_message(text: str | None, thoughts: Iterable[str]) -> dict[str, Any]:
    """Return a message of the assistant in a chat completion, with the thoughts before it."""
    thought = "\n\n".join(filter(None, thoughts))
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def parsed_arguments(arguments: str) -> Any:
    """Return the JSON that a model wrote as the arguments of a call; the text itself if it is not JSON."""
    try:
        return json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return arguments


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def text_of_parts(content: Any, kinds: Sequence[str], where: str) -> str:
    """Return the text of a content field, which is a string or a list of text parts. A missing field has an empty text.

    Raises:
        BadRequest: The content is neither, or the type of a part is not in ``kinds``.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} is a {type(content).__name__}, wanted text or a list of parts", where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.{number} is of type {kind!r}; this model takes {' or '.join(kinds)}", where)
        texts.append(part["text"])
    return "".join(texts)


def definitions(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that shows a model the definitions of tools which a search found in the middle of a conversation.
    They are not added to the offered tools: that would change the beginning of the prompt.
    """
    lines = [f"<function>{json.dumps(function, ensure_ascii=False)}</function>" for function in functions]
    return "\n".join(["<functions>", *lines, "</functions>"])


def usage_of(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of sampled tokens of an answer: as the engine reports them, or else
    counted.
    """
    used = answer.get("usage") or {}
    prompt = used.get("prompt_tokens", len(answer.get("prompt_token_ids") or ()))
    sampled = sum(len(choice.get("token_ids") or ()) for choice in answer.get("choices") or ())
    return int(prompt), int(used.get("completion_tokens", sampled))
