"""Converts an engine's answer to its recorded event, and back. Tokens and logprobs are the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.gateway.lineages import Chain, Lineages, Match
from trinity_mq.messages import SampledChoice, SessionCall
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.recording.sse import malformed_calls_of, numbers, text_of

RECORDED_SESSIONS = "recorded_sessions"
"""Name of the workflow that builds experiences from recorded calls."""


def recorded_call(
    answer: Mapping[str, Any],
    body: Mapping[str, Any],
    lineages: Lineages,
    chain: Chain | None,
    match: Match | None,
    *,
    temperature: float,
    **fields: Any,
) -> SessionCall:
    """Return the event that records an answer.

    Args:
        answer: Answer of the engine, in the format of a chat or text completion made with ``return_token_ids``.
        body: Body of the request as the engine received it.
        lineages: Earlier calls of the session.
        chain: Digests of the messages of the request. None: it has no readable messages, or no other call of its
            session is recorded.
        match: The recorded answer that its messages continue. None: they continue none.
        temperature: Sampling temperature of the answer.
        fields: Further fields of the event, which do not depend on the answer.

    Raises:
        EngineRefused: The answer has no token ids, an invalid token id, or not exactly one logprob per token.
    """
    choices = answer["choices"]
    prompt = answer.get("prompt_token_ids") or (choices and choices[0].get("prompt_token_ids"))
    if not choices or not prompt or any(choice.get("token_ids") is None for choice in choices):
        raise EngineRefused(
            "the engine's answer has no token ids: recording needs an engine that supports return_token_ids", 200
        )
    prompt_text = prompt_text_of(answer)
    try:
        place = lineages.place(prompt, prompt_text, temperature, match)
    except ValueError as error:
        raise EngineRefused(f"the engine's answer has {error}", 200) from error
    continued, version = place.continued, answer.get("weight_version")
    return SessionCall(
        **fields,
        temperature=temperature,
        continues="" if continued is None else continued.call,
        choice=0 if continued is None else continued.choice,
        prompt=prompt if continued is None else prompt[continued.length :],
        prompt_text=prompt_text if continued is None else "",
        choices=[_sampled(choice, chain) for choice in choices],
        version=None if version is None else (version[0], version[1]),
        break_cause=place.break_cause,
        tied=place.is_tied,
        request={}
        if lineages.count
        else {name: body[name] for name in ("messages", "tools", "prompt") if name in body},
    )


def prompt_text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of the prompt of an answer. Empty: the engine does not report it."""
    return str(answer.get("prompt_text") or answer["choices"][0].get("prompt_text") or "")


def _sampled(choice: Mapping[str, Any], chain: Chain | None) -> SampledChoice:
    ids, logprobs, message = choice["token_ids"], numbers(choice), choice.get("message")
    if logprobs is None or len(logprobs) != len(ids):
        raise EngineRefused(
            f"the engine's answer has {0 if logprobs is None else len(logprobs)} logprobs for {len(ids)} tokens", 200
        )
    conversation, identity = chain.answered(message) if chain is not None and message else ("", "")
    return SampledChoice(
        ids=ids,
        logprobs=logprobs,
        text=text_of(choice),
        finish_reason=choice.get("finish_reason"),
        versions=[(row[0], row[1], row[2]) for row in choice.get("weight_versions") or ()],
        conversation=conversation,
        identity=identity,
        malformed_calls=malformed_calls_of(choice),
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


def prompt_of(call: SessionCall, calls: Mapping[str, SessionCall]) -> list[int]:
    """Return the token ids of the whole prompt of a call.

    Args:
        call: The call.
        calls: Recorded calls of the session by id.

    Raises:
        ValueError: The call continues an answer that is missing, or itself.
    """
    parts, left = [call.prompt], len(calls)
    while call.continues:
        continued = calls.get(call.continues)
        if continued is None or call.choice >= len(continued.choices) or not left:
            raise ValueError(f"call {call.call} continues {call.continues}, answer {call.choice}, which does not exist")
        parts += [continued.choices[call.choice].ids, continued.prompt]
        call, left = continued, left - 1
    return [token for part in reversed(parts) for token in part]
