"""Completions in the form of the OpenAI API, with our extensions if they were requested."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from trinity_mq.engines.generation.request import Alternatives, Completion, FinishReason
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.server.openai.requests import ChatBody, CompletionBody, SamplingBody
from trinity_mq.families.family import ParsedAnswer
from trinity_mq.families.messages import THOUGHTS
from trinity_mq.messages import Version


def envelope(
    kind: str,
    prefix: str,
    model: str,
    choices: list[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
) -> dict[str, Any]:
    """Return an answer with ``choices`` and the token usage."""
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(prompt_tokens, sampled),
    }


def usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
    """Return the token usage."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def chat_choice(
    index: int,
    completion: Completion,
    answer: ParsedAnswer,
    body: ChatBody,
    version: Version,
    codec: TextCodec,
) -> dict[str, Any]:
    """Return one choice of a chat completion. ``answer`` holds the parts of the completion's text."""
    message, finish_reason = chat_message(answer, completion.finish_reason)
    choice = {
        "index": index,
        "message": {"role": "assistant", **message},
        "logprobs": chat_logprobs(completion.token_ids, completion.logprobs, codec, completion.top_logprobs)
        if body.logprobs
        else None,
        "finish_reason": finish_reason,
    }
    if body.return_token_ids:
        choice |= answer_fields(answer, completion.text)
    return choice | _additions(completion, body, version)


def chat_message(answer: ParsedAnswer, finish_reason: FinishReason) -> tuple[dict[str, Any], str]:
    """Return the fields of a message for an answer, and its finish reason. The content is None if the response holds
    nothing but calls.
    """
    thoughts = {THOUGHTS: answer.thoughts} if answer.thoughts else {}
    if not answer.calls:
        return {"content": answer.content, **thoughts}, finish_reason
    ended = "tool_calls" if finish_reason == "stop" else finish_reason
    return {"content": answer.content or None, **thoughts, "tool_calls": answer.calls}, ended


def answer_fields(answer: ParsedAnswer, text: str) -> dict[str, Any]:
    """Return our own fields of a choice: the sampled text if the content is another text, and the malformed calls."""
    fields: dict[str, Any] = {"response_text": text} if answer.content != text or answer.calls else {}
    return fields | ({"malformed_calls": answer.malformed} if answer.malformed else {})


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], codec: TextCodec, tops: Sequence[Alternatives] = ()
) -> dict[str, Any]:
    """Return the logprobs of a choice with the text of each token. ``tops``: likeliest tokens at the place of each
    token; empty if they were not requested.
    """
    texts = codec.decode([[token] for token in token_ids])
    likeliest = [
        [{"token": text, "logprob": logprob, "bytes": list(text.encode())} for text, logprob in top]
        for top in _with_texts(tops, codec)
    ]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": top}
            for text, logprob, top in zip(texts, logprobs, likeliest or [[]] * len(texts), strict=True)
        ]
    }


def text_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    codec: TextCodec,
    offset: int = 0,
    tops: Sequence[Alternatives] = (),
) -> dict[str, Any]:
    """Return the logprobs of a text completion's choice; its tokens begin ``offset`` characters into the text.
    ``tops``: as for :func:`chat_logprobs`. Of tokens with the same text only the likeliest is returned.
    """
    texts = codec.decode([[token] for token in token_ids])
    ends = list(itertools.accumulate((len(text) for text in texts), initial=offset))
    likeliest = [_by_text(top) for top in _with_texts(tops, codec)]
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": likeliest or None,
        "text_offset": ends[:-1],
    }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    for text, logprob in top:
        logprobs.setdefault(text, logprob)
    return logprobs


def _with_texts(tops: Sequence[Alternatives], codec: TextCodec) -> list[list[tuple[str, float]]]:
    """Return the likeliest tokens as pairs of text and logprob."""
    texts = iter(codec.decode([[token] for top in tops for token, _ in top]))
    return [[(next(texts), logprob) for _, logprob in top] for top in tops]


def text_choice(
    index: int, completion: Completion, body: CompletionBody, version: Version, codec: TextCodec
) -> dict[str, Any]:
    """Return one choice of a text completion."""
    choice = {
        "index": index,
        "text": completion.text,
        "logprobs": None
        if body.logprobs is None
        else text_logprobs(completion.token_ids, completion.logprobs, codec, tops=completion.top_logprobs),
        "finish_reason": completion.finish_reason,
    }
    return choice | _additions(completion, body, version)


def _trainable(completion: Completion) -> list[float | None]:
    """Return the logprobs with None at the places where the form of the answer decided: the model alone would have
    sampled from another distribution, so training leaves these tokens out.
    """
    constrained = frozenset(completion.constrained)
    return [None if place in constrained else value for place, value in enumerate(completion.logprobs)]


def _additions(completion: Completion, body: SamplingBody, version: Version) -> dict[str, Any]:
    extensions: dict[str, Any] = {"stop_reason": completion.stopped_by} if completion.stopped_by else {}
    if not body.return_token_ids:
        return extensions
    if completion.routed_experts is not None:
        extensions["routed_experts"] = completion.routed_experts.as_json()
    return extensions | {
        "token_ids": completion.token_ids,
        "token_logprobs": _trainable(completion) if completion.constrained else completion.logprobs,
        "weight_versions": [list(run) for run in completion.versions] or [[0, *version]],
    }
