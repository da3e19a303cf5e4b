"""Completions in the form of the OpenAI API, with our additions where they were asked for."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from trinity_mq.messages import Version
from trinity_mq.models.engines.bodies import ChatBody, CompletionBody, SamplingBody
from trinity_mq.models.engines.requests import Completion
from trinity_mq.models.engines.text import TextCodec


def envelope(
    kind: str,
    prefix: str,
    model: str,
    choices: list[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
) -> dict[str, Any]:
    """Return an answer around its choices, with the tokens used."""
    asked = sum(len(prompt) for prompt in prompts)
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled},
    }


def chat_choice(
    index: int, completion: Completion, body: ChatBody, version: Version, codec: TextCodec
) -> dict[str, Any]:
    """Return one choice of a chat completion."""
    logprobs = None
    if body.logprobs:
        texts = codec.decode([[token] for token in completion.token_ids])
        logprobs = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, completion.logprobs, strict=True)
            ]
        }
    message = {"role": "assistant", "content": completion.text}
    choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}
    return choice | _additions(completion, body, version)


def text_choice(
    index: int, completion: Completion, body: CompletionBody, version: Version, codec: TextCodec
) -> dict[str, Any]:
    """Return one choice of a text completion."""
    logprobs = None
    if body.logprobs is not None:
        texts = codec.decode([[token] for token in completion.token_ids])
        offsets, end = [], 0
        for text in texts:
            offsets.append(end)
            end += len(text)
        logprobs = {
            "tokens": texts,
            "token_logprobs": completion.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    choice = {
        "index": index,
        "text": completion.text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
    return choice | _additions(completion, body, version)


def _additions(completion: Completion, body: SamplingBody, version: Version) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    return {
        "token_ids": completion.token_ids,
        "token_logprobs": completion.logprobs,
        "weight_versions": [[0, *version]],  # no weights change within a round
    }
