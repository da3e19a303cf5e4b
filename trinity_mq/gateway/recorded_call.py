"""Converts an engine's answer to its recorded event, and back. Tokens and logprobs are the engine's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.messages import SampledChoice, SessionCall
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.recording.sse import numbers, text_of

RECORDED_SESSIONS = "recorded_sessions"
"""Name of the workflow that builds experiences from recorded calls."""
KEPT_TURNS = 4
"""Number of latest calls of a session that a new prompt is compared with."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call in the form for comparison with the prompts of later calls of its session."""

    call: str
    tokens: Sequence[list[int]]
    """Token ids of prompt and answer, by choice."""
    texts: Sequence[str]
    """Text of prompt and answer, by choice. Empty if the engine returned no prompt text."""
    temperature: float
    messages: Sequence[Any] = field(default=())
    """Messages of the request. Empty if it had none."""


def recorded_call(
    answer: Mapping[str, Any],
    earlier: Sequence[Turn],
    *,
    session: str,
    call: str,
    path: str,
    at: float,
    request: Mapping[str, Any],
    temperature: float,
    digest: str = "",
    traceparent: str = "",
) -> tuple[SessionCall, Turn]:
    """Return the event that records an answer, and the turn for comparison with later calls.

    Args:
        answer: Answer of the engine, in the format of a chat or text completion made with ``return_token_ids``.
        earlier: Latest calls of the session.
        session: Id of the session.
        call: Id of the answer.
        path: Route of the request.
        at: Time in seconds since the epoch.
        request: Body of the request as the engine received it.
        temperature: Sampling temperature of the answer.
        digest: Digest of the request. Equal requests have equal digests.
        traceparent: Trace header of the request. Empty: the request had none.

    Raises:
        EngineRefused: The answer has no token ids, or has not exactly one logprob per token.
    """
    choices = answer["choices"]
    prompt = answer.get("prompt_token_ids") or (choices and choices[0].get("prompt_token_ids"))
    if not choices or not prompt or any(choice.get("token_ids") is None for choice in choices):
        raise EngineRefused(
            "the engine's answer has no token ids: recording needs an engine that supports return_token_ids", 200
        )
    prompt_text = answer.get("prompt_text") or choices[0].get("prompt_text") or ""
    messages = request.get("messages") or ()
    texts = [text_of(choice) for choice in choices]
    turn = Turn(
        call,
        [[*prompt, *choice["token_ids"]] for choice in choices],
        [prompt_text + text for text in texts] if prompt_text else [],
        temperature,
        messages,
    )
    continued, cause = _continued(prompt, prompt_text, messages, temperature, earlier)
    skipped = 0 if continued is None else len(continued[0].tokens[continued[1]])
    version = answer.get("weight_version")
    event = SessionCall(
        session=session,
        call=call,
        at=at,
        path=path,
        temperature=temperature,
        continues="" if continued is None else continued[0].call,
        choice=0 if continued is None else continued[1],
        prompt=list(prompt[skipped:]),
        prompt_text=prompt_text if continued is None else "",
        choices=[_sampled(choice, text) for choice, text in zip(choices, texts, strict=True)],
        version=None if version is None else (version[0], version[1]),
        digest=digest,
        break_cause=cause,
        request={} if earlier else {name: request[name] for name in ("messages", "tools", "prompt") if name in request},
        traceparent=traceparent,
    )
    return event, turn


def _continued(
    prompt: list[int], text: str, messages: Sequence[Any], temperature: float, earlier: Sequence[Turn]
) -> tuple[tuple[Turn, int] | None, str]:
    """Return the longest matching turn and choice that the prompt begins with, or the reason why no match exists."""
    prefixes = [
        (turn, number)
        for turn in earlier
        for number, tokens in enumerate(turn.tokens)
        if len(tokens) <= len(prompt) and prompt[: len(tokens)] == tokens
    ]
    same = [prefix for prefix in prefixes if prefix[0].temperature == temperature]
    if same:
        return max(same, key=lambda prefix: len(prefix[0].tokens[prefix[1]])), ""
    if not earlier:
        return None, ""
    if prefixes:
        return None, "temperature"
    if text and any(text.startswith(earlier_text) for turn in earlier for earlier_text in turn.texts):
        return None, "retoken"
    if messages and any(
        turn.messages and list(messages[: len(turn.messages)]) == list(turn.messages) for turn in earlier
    ):
        return None, "template"
    return None, "new"


def _sampled(choice: Mapping[str, Any], text: str) -> SampledChoice:
    ids, logprobs = choice["token_ids"], numbers(choice)
    if logprobs is None or len(logprobs) != len(ids):
        raise EngineRefused(
            f"the engine's answer has {0 if logprobs is None else len(logprobs)} logprobs for {len(ids)} tokens", 200
        )
    return SampledChoice(
        ids=ids,
        logprobs=logprobs,
        text=text,
        finish_reason=choice.get("finish_reason"),
        versions=[(row[0], row[1], row[2]) for row in choice.get("weight_versions") or ()],
    )


def answer_of(call: SessionCall, prompt: list[int], choice: int | None = None) -> dict[str, Any]:
    """Return the answer to a call in the engine's format.

    Args:
        call: The call.
        prompt: Token ids of its prompt.
        choice: Index of the only choice to return. None: all choices.
    """
    choices = call.choices if choice is None else [call.choices[choice]]
    return {
        "prompt_token_ids": prompt,
        "prompt_text": call.prompt_text or None,
        **({} if call.version is None else {"weight_version": list(call.version)}),
        "choices": [
            {
                "token_ids": choice.ids,
                "token_logprobs": choice.logprobs,
                "weight_versions": [list(row) for row in choice.versions],
                "finish_reason": choice.finish_reason,
                "text": choice.text,
            }
            for choice in choices
        ],
    }


class Answers:
    """Prompts of the calls of a session.

    Args:
        calls: Recorded calls of the session, in their order.
    """

    def __init__(self, calls: Sequence[SessionCall]) -> None:
        self._calls = {call.call: call for call in calls}
        self._prompts: dict[str, list[int]] = {}

    def prompt(self, call: SessionCall) -> list[int]:
        """Return the token ids of the prompt of a call.

        Raises:
            ValueError: The call continues a call that is missing.
        """
        if call.call not in self._prompts:
            tokens: list[int] = []
            if call.continues:
                continued = self._calls.get(call.continues)
                if continued is None or not call.choice < len(continued.choices):
                    raise ValueError(
                        f"call {call.call} continues {call.continues}, answer {call.choice}, which does not exist"
                    )
                tokens = [*self.prompt(continued), *continued.choices[call.choice].ids]
            self._prompts[call.call] = [*tokens, *call.prompt]
        return self._prompts[call.call]
