"""Turns an engine's answer into the event that records it, and back. Tokens and logprobs stay those of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.messages import SampledChoice, SessionCall
from trinity_mq.models.errors import EngineRefused
from trinity_mq.models.recording.sse import numbers, text_of

RECORDED_SESSIONS = "recorded_sessions"
"""Name of the workflow that makes experiences of recorded calls."""
KEPT_TURNS = 4
"""Latest calls of a session that a new prompt is compared with."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call, for comparing the prompts of later calls of its session with it."""

    call: str
    tokens: Sequence[list[int]]
    """Prompt and answer, by choice."""
    texts: Sequence[str]
    """The same as text; empty where the engine gave none."""
    temperature: float
    messages: Sequence[Any] = field(default=())
    """Messages of the request, where it had any."""


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
    """Return the event of an answer, and its turn, with which later calls are compared.

    Args:
        answer: The engine's, in the form of a chat or text completion made with ``return_token_ids``.
        earlier: The session's latest calls.
        session: Id of the session.
        call: Id of the answer.
        path: Route of the request.
        at: Seconds since the epoch.
        request: Body of the request as the engine got it.
        temperature: At which it was sampled.
        digest: The same text for the same request.
        traceparent: Header of the request; empty: it had none.

    Raises:
        EngineRefused: The answer has no token ids or not a logprob for each.
    """
    choices = answer["choices"]
    prompt = answer.get("prompt_token_ids") or (choices and choices[0].get("prompt_token_ids"))
    if not choices or not prompt or any(choice.get("token_ids") is None for choice in choices):
        raise EngineRefused(
            "the engine's answer has no token ids: only engines that know return_token_ids are recorded", 200
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
    """Return the call and the choice that a prompt begins with, the longest one; else why there is none."""
    found = [
        (turn, number)
        for turn in earlier
        for number, tokens in enumerate(turn.tokens)
        if len(tokens) <= len(prompt) and prompt[: len(tokens)] == tokens
    ]
    same = [one for one in found if one[0].temperature == temperature]
    if same:
        return max(same, key=lambda one: len(one[0].tokens[one[1]])), ""
    if not earlier:
        return None, ""
    if found:
        return None, "temperature"
    if text and any(text.startswith(known) for turn in earlier for known in turn.texts):
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


class Answers:
    """The answers of one session's calls, as the engine gave them.

    Args:
        calls: In their order.
    """

    def __init__(self, calls: Sequence[SessionCall]) -> None:
        self._calls = {call.call: call for call in calls}
        self._prompts: dict[str, list[int]] = {}

    def prompt(self, call: SessionCall) -> list[int]:
        """Return the token ids of a call's prompt.

        Raises:
            ValueError: A call that it continues is missing.
        """
        if call.call not in self._prompts:
            tokens: list[int] = []
            if call.continues:
                before = self._calls.get(call.continues)
                if before is None or not call.choice < len(before.choices):
                    raise ValueError(
                        f"call {call.call} continues {call.continues}, answer {call.choice}, which is not there"
                    )
                tokens = [*self.prompt(before), *before.choices[call.choice].ids]
            self._prompts[call.call] = [*tokens, *call.prompt]
        return self._prompts[call.call]

    def answer(self, call: SessionCall) -> dict[str, Any]:
        """Return a call's answer in the form in which engines give it; errors as :meth:`prompt`."""
        return {
            "prompt_token_ids": self.prompt(call),
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
                for choice in call.choices
            ],
        }
