"""Chat and text completions of the OpenAI API. Engines use the same format; fields for training are removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.gateway.protocols.base import (
    BadRequest,
    EngineRequest,
    Events,
    Protocol,
    as_object,
    data_event,
    error_body,
    usage_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FOR_TRAINING = ("prompt_token_ids", "prompt_text", "weight_version")
FOR_TRAINING_OF_A_CHOICE = (
    *FOR_TRAINING,
    "token_ids",
    "token_logprobs",
    "weight_versions",
    "response_text",
    "malformed_calls",
    "routed_experts",
)
OF_GATEWAY = ("continue_tokens", "continue_messages")
"""Options that the gateway sets from its own record. With tokens of its own choice, an agent would replace the part of
the prompt that the chat template writes.
"""
DONE = b"data: [DONE]\n\n"


class OpenAIEvents(Events):
    """Passes on the engine's chunks with the id of the gateway's answer, without fields that the client did not
    request.
    """

    def __init__(self, call: str, body: Mapping[str, Any]) -> None:
        self._call, self._body = call, body
        self._wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def opening(self) -> list[bytes]:
        return []

    def of(self, chunk: Mapping[str, Any]) -> list[bytes]:
        if not chunk.get("choices") and not self._wants_usage:
            return []
        return [data_event(_public(chunk, self._call, self._body))]

    def closing(self, answer: Mapping[str, Any]) -> list[bytes]:
        return [DONE]

    def failed(self, message: str, kind: str) -> list[bytes]:
        return [data_event(error_body(message, kind))]


class OpenAIProtocol(Protocol):
    """Translation of one of the two routes, chat or text completions."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.prefix = "chatcmpl-" if path == CHAT else "cmpl-"

    def request(self, body: Mapping[str, Any]) -> EngineRequest:
        as_object(body.get("stream_options"), "stream_options")
        if option := next((name for name in OF_GATEWAY if body.get(name) is not None), None):
            raise BadRequest(f"{option} is set by the gateway, from the session's recorded calls; leave it out", option)
        prompt = body.get("prompt")
        if self._path == COMPLETIONS and isinstance(prompt, list) and len(prompt) != 1 and not _is_tokens(prompt):
            raise BadRequest(f"prompt is a list of {len(prompt)} prompts; send one prompt a request", "prompt")
        return EngineRequest(self._path, dict(body), bool(body.get("stream")), _asks_logprobs(body))

    def answer(self, answer: Mapping[str, Any], call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _public(answer, call, body)

    def events(self, call: str, body: Mapping[str, Any]) -> OpenAIEvents:
        return OpenAIEvents(call, body)


def _is_tokens(prompt: list[Any]) -> bool:
    return all(type(token) is int for token in prompt)


def _asks_logprobs(body: Mapping[str, Any]) -> bool:
    """Return whether logprobs are requested. In text completions, 0 requests the logprobs of the sampled tokens."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


def _public(answer: Mapping[str, Any], call: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer or a chunk with the gateway's id, without the training fields and logprobs that the agent did
    not request, and with the model name of the request.
    """
    if body.get("return_token_ids"):
        return {**answer, "id": call}
    public = {name: value for name, value in answer.items() if name not in FOR_TRAINING}
    asks_logprobs = _asks_logprobs(body)
    public["choices"] = [
        {
            name: value if name != "logprobs" or asks_logprobs else None
            for name, value in choice.items()
            if name not in FOR_TRAINING_OF_A_CHOICE
        }
        for choice in answer.get("choices") or ()
    ]
    if "usage" not in public and public.get("object") in {"chat.completion", "text_completion"}:
        prompt, sampled = usage_of(answer)
        public["usage"] = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    if not body.get("model"):
        return {**public, "id": call}
    return {**public, "id": call, "model": body["model"]}
