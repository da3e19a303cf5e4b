"""An engine's answer as experiences: tensors are built once for all its choices and cut into views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trinity_mq.experience import Experience
from trinity_mq.models.errors import EngineRefused, PromptTooLong

MASKED_TEXT = "[the prompt is too long: this experience is masked out]"


def experiences_of(answer: Mapping[str, Any], temperature: float) -> list[Experience]:
    """Return one experience for each choice of a chat or text completion made with ``return_token_ids``.

    Args:
        answer: The JSON body.
        temperature: As requested. At 0 the logprobs are those of temperature 1, and so the experience says.

    Raises:
        EngineRefused: The answer holds no token ids: the server does not know ``return_token_ids``.
    """
    choices = answer["choices"]
    try:
        prompts = [choice["prompt_token_ids"] if "text" in choice else answer["prompt_token_ids"] for choice in choices]
        responses = [choice["token_ids"] for choice in choices]
        logprobs = [choice["token_logprobs"] for choice in choices]
    except KeyError as error:
        raise EngineRefused(
            f"the server's answer has no {error}: only engines that know return_token_ids make experiences",
            200,
            "no_token_ids",
        ) from error
    sizes = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    flat = [token for prompt, response in zip(prompts, responses, strict=True) for token in (*prompt, *response)]
    tokens = torch.tensor(flat, dtype=torch.int32).split_with_sizes(sizes)
    values = torch.tensor([value for row in logprobs for value in row], dtype=torch.float32).split_with_sizes(
        [len(row) for row in logprobs]
    )
    heat = temperature or 1.0
    return [
        Experience(
            tokens=tokens[place],
            logprobs=values[place],
            prompt_length=len(prompts[place]),
            prompt_text=choice.get("prompt_text", answer.get("prompt_text")),
            response_text=choice["text"] if "text" in choice else choice["message"]["content"],
            truncate_status="response_truncated" if choice["finish_reason"] == "length" else None,
            versions=[tuple(row) for row in choice.get("weight_versions") or ()] or None,
            temperature=heat,
        )
        for place, choice in enumerate(choices)
    ]


def masked_experiences(error: PromptTooLong, count: int, temperature: float) -> list[Experience]:
    """Return ``count`` experiences for a prompt that is too long: cut, without reward, nothing of them trained on."""
    tokens = torch.tensor(error.token_ids[: error.limit + 1], dtype=torch.int32)
    return [
        Experience(
            tokens=tokens,
            logprobs=torch.zeros(1),
            prompt_length=error.limit,
            reward=0.0,
            response_text=MASKED_TEXT,
            truncate_status="prompt_truncated",
            temperature=temperature or 1.0,
        )
        for _ in range(count)
    ]


def conversation_experience(
    tokens: Sequence[int],
    assistant_mask: Sequence[int],
    logprobs: Sequence[float],
    *,
    max_length: int,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    version: Sequence[int],
    temperature: float,
) -> Experience:
    """Return a conversation as one multi-turn experience: the response starts at the assistant's first token.

    Args:
        tokens: All of them, already cut to ``max_length`` where the conversation is longer.
        assistant_mask: One for each token of the whole conversation: 1 where the assistant wrote it.
        logprobs: Of every token after the first.
        max_length: Tokens kept of a longer conversation.
        messages: Kept in the experience.
        tools: Kept in the experience.
        version: That scored it.
        temperature: The logits were divided by it.

    Raises:
        ValueError: Nothing of what is kept was written by the assistant, or its first token is the first of all.
    """
    mask = list(assistant_mask[: len(tokens)])
    first = mask.index(1) if 1 in mask else 0
    if first == 0:
        raise ValueError(
            f"no token of the assistant among the {len(tokens)} kept, after some prompt: nothing to train on"
        )
    return Experience(
        tokens=list(tokens),
        logprobs=list(logprobs[first - 1 :]),
        action_mask=torch.tensor(mask[first:], dtype=torch.bool),
        prompt_length=first,
        messages=list(messages),
        tools=None if tools is None else list(tools),
        truncate_status="response_truncated" if len(assistant_mask) > max_length else None,
        versions=[(0, int(version[0]), int(version[1]))],
        temperature=temperature,
    )
