"""Converts an engine's answer to experiences: all choices at once where possible, else choice by choice."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.eid import new_eids
from trinity_mq.experience.fields import sampling_temperature
from trinity_mq.experience.record import FIELD_NAMES
from trinity_mq.experience.rules import PROMPT_TRUNCATED, RESPONSE_TRUNCATED, SINGLE_TURN, Versions
from trinity_mq.models.errors import EngineRefused, PromptTooLong
from trinity_mq.models.recording.sse import malformed_calls_of, numbers, text_of

MASKED_TEXT = "[the prompt is too long: this experience is masked out]"

LEAST_LOGPROB, LARGEST_LOGPROB = -9999.0, 1e30
"""Logprobs of sampled tokens lie between these limits. vLLM writes the lower limit for minus infinity."""
WHOLE = frozenset({"stop", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of a response that counts as complete; any other response is ``response_truncated``."""
_NONE = repeat(None)


def experiences_of(answer: Mapping[str, Any], temperature: float, *, text_only: bool = False) -> list[Experience]:
    """Return one experience for each choice of a chat or text completion made with ``return_token_ids``.

    The function accepts answers of our engines, of vLLM and of compatible servers: prompt tokens next to the choices or
    in each choice, logprobs as ``token_logprobs`` of the choice or inside its ``logprobs``. Versions come from
    ``weight_versions`` of a choice, else from ``weight_version`` of the answer, else they are unknown. A response that
    was cut off by a limit, by the server or by closing the stream is ``response_truncated``.

    A token whose logprob is not a finite number (None, NaN, minus infinity, or vLLM's -9999) is kept but not trained
    on: its action mask is False, its logprob is 0, and the metric ``unknown_logprobs`` counts it. The rest of its
    answer and the other runs of the task are not affected.

    Args:
        answer: The JSON body.
        temperature: Requested temperature. At 0 the logprobs are from temperature 1, which the experience records.
        text_only: If token ids are missing, make experiences from the texts alone, without trainable tokens.

    Raises:
        EngineRefused: The answer holds no choices, no token ids, not one logprob per token, or experts that cannot be
            read.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise EngineRefused("the server's answer has no choices: it is not a completion", 200, "no_choices")
    if text_only and any(choice.get("token_ids") is None for choice in choices):
        return [_text_experience(choice, temperature) for choice in choices]
    if (experiences := experiences_from_columns(answer, temperature)) is not None:
        return experiences
    return [_experience(choice, answer, temperature) for choice in choices]


def _experience(choice: Mapping[str, Any], answer: Mapping[str, Any], temperature: float) -> Experience:
    prompt = _ids(choice if choice.get("prompt_token_ids") is not None else answer, "prompt_token_ids")
    response = _ids(choice, "token_ids")
    values = _logprobs(choice, len(response))
    is_finite = [value is not None and LEAST_LOGPROB < value < math.inf for value in values]
    unknown = is_finite.count(False)
    logprobs = (
        [value if usable else 0.0 for value, usable in zip(values, is_finite, strict=True)] if unknown else values
    )
    return Experience(
        experience_type=SINGLE_TURN,
        tokens=_tensor([*prompt, *response], torch.int32),
        logprobs=_tensor(logprobs, torch.float32),
        action_mask=torch.tensor(is_finite) if unknown else None,
        metrics={**_malformed(choice), **({"unknown_logprobs:sum": unknown} if unknown else {})},
        prompt_length=len(prompt),
        prompt_text=choice.get("prompt_text", answer.get("prompt_text")),
        response_text=text_of(choice),
        truncate_status=None if choice.get("finish_reason") in WHOLE else RESPONSE_TRUNCATED,
        versions=_versions(choice, answer),
        temperature=temperature or 1.0,
        routed_experts=_routed_experts(choice, len(prompt) + len(response) - 1),
    )


def _malformed(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return the metric of tool calls that begin in a choice but cannot be read; no metric if all can be read."""
    count = malformed_calls_of(choice)
    return {"malformed_calls:sum": count} if count else {}


def _routed_experts(choice: Mapping[str, Any], tokens: int) -> Tensor | None:
    """Return the experts of a choice, uint8 ``[tokens, layers, top-k]``; None if the engine does not report them.

    Raises:
        EngineRefused: The value does not describe the experts of ``tokens`` tokens.
    """
    if (value := choice.get("routed_experts")) is None:
        return None
    try:
        shape, data = tuple(map(int, value["shape"])), bytearray(base64.b64decode(value["data"], validate=True))
        if len(shape) != 3 or shape[0] != tokens or min(shape) < 1 or math.prod(shape) != len(data):
            raise ValueError(f"shape {list(shape)} with {len(data)} bytes")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineRefused(
            f"the server's answer has routed_experts that cannot be read ({error}), wanted the shape [{tokens}, "
            "layers, experts per token] and as many bytes in base64",
            200,
            "routed_experts",
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def _tensor(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers as a tensor ``[len(values)]``; for a short list this takes a third of the time of
    torch.tensor.
    """
    if not values:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(array("i" if dtype == torch.int32 else "f", values), dtype=dtype)


def _ids(where: Mapping[str, Any], name: str) -> list[int]:
    ids: list[int] | None = where.get(name)
    if ids is None:
        raise EngineRefused(
            f"the server's answer has no {name!r}: experiences need an engine that supports return_token_ids",
            200,
            "no_token_ids",
        )
    return ids


def _logprobs(choice: Mapping[str, Any], count: int) -> list[float | None]:
    values = numbers(choice)
    if values is None or len(values) != count:
        raise EngineRefused(
            f"the server's answer has {'no' if values is None else len(values)} logprobs for {count} tokens, wanted "
            "one for each: experiences need an engine that returns the logprobs of the sampled tokens",
            200,
            "no_logprobs",
        )
    return values


def _versions(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> Versions | None:
    rows = choice.get("weight_versions")
    if not rows and answer.get("weight_version") is not None:
        rows = [[0, *answer["weight_version"]]]
    return [(int(first), int(generation), int(step)) for first, generation, step in rows] if rows else None


def _text_experience(choice: Mapping[str, Any], temperature: float) -> Experience:
    return Experience(
        tokens=torch.zeros(2, dtype=torch.int32),  # an experience needs tokens; the mask excludes them from training
        action_mask=torch.zeros(1, dtype=torch.bool),
        response_text=text_of(choice),
        truncate_status=None if choice.get("finish_reason") in WHOLE else RESPONSE_TRUNCATED,
        temperature=temperature or 1.0,
        info={"text_only": True},
    )


def masked_experiences(error: PromptTooLong, count: int, temperature: float) -> list[Experience]:
    """Return ``count`` experiences for a prompt that is too long: cut, with reward 0, and without trainable tokens."""
    tokens = torch.tensor(error.token_ids[: error.limit + 1], dtype=torch.int32)
    return [
        Experience(
            tokens=tokens,
            logprobs=torch.zeros(1),
            prompt_length=error.limit,
            reward=0.0,
            response_text=MASKED_TEXT,
            truncate_status=PROMPT_TRUNCATED,
            metrics={"prompt_truncated:sum": 1.0},
            temperature=temperature or 1.0,
        )
        for _ in range(count)
    ]


def is_asked(experiences: Sequence[Experience]) -> bool:
    """Return whether the model was asked. False: there are experiences, and each is a placeholder for a prompt that is
    too long.
    """
    return not experiences or any(
        getattr(experience, "truncate_status", None) != PROMPT_TRUNCATED for experience in experiences
    )


def check_asked(experiences: list[Experience], model: object = None) -> list[Experience]:
    """Return ``experiences``, the result of a run or a request, unless all of them are unwanted placeholders.

    Args:
        experiences: The experiences.
        model: The model that was asked. Its attribute ``enable_prompt_truncation`` is true if placeholders are wanted.

    Raises:
        PromptTooLong: Every experience is a placeholder for a prompt that is too long, and placeholders are not wanted.
    """
    if is_asked(experiences) or getattr(model, "enable_prompt_truncation", False):
        return experiences
    limit = experiences[0].prompt_length
    raise PromptTooLong(
        f"the prompt has more than {limit} tokens, the limit of model.max_prompt_tokens and model.max_model_len; "
        "shorten it, leave the record out, or raise these limits",
        experiences[0].tokens.tolist(),
        limit,
    )


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
    """Return a conversation as one multi-turn experience; the response starts at the assistant's first token.

    Args:
        tokens: Tokens of the conversation, already cut to ``max_length``.
        assistant_mask: One entry per token of the uncut conversation: 1 for the assistant's tokens.
        logprobs: Logprob of every token after the first.
        max_length: Maximum number of tokens.
        messages: Stored in the experience.
        tools: Stored in the experience.
        version: Weight version that scored the tokens.
        temperature: Divisor of the logits.

    Raises:
        ValueError: The cut conversation has no token of the assistant, or begins with a token of the assistant.
    """
    mask = list(assistant_mask[: len(tokens)])
    first = mask.index(1) if 1 in mask else 0
    if first == 0:
        raise ValueError(
            f"the {len(tokens)} kept tokens hold no token of the assistant after a prompt: nothing to train on"
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


def experiences_from_columns(answer: Mapping[str, Any], temperature: float) -> list[Experience] | None:
    """Return the experiences of an answer in the usual form, as :func:`experiences_of` does: the choices share a
    prompt, and each has token ids, a finite logprob for each token, and at most one weight version. Return None for any
    other answer, which the caller converts choice by choice.

    All checks of the Experience constructor are done here, for all choices at once. The tensors of the experiences are
    slices of common arrays and do not overlap.

    Args:
        answer: JSON body with ``choices``.
        temperature: Requested temperature.

    Raises:
        ExperienceError: The temperature is invalid.
    """
    choices, prompt, prompt_text = answer["choices"], answer.get("prompt_token_ids"), answer.get("prompt_text")
    if not prompt or type(prompt) is not list or not (prompt_text is None or type(prompt_text) is str):
        return None
    responses: list[list[int]] = []
    logprobs: list[Any] = []
    sizes: list[int] = []
    for choice in choices:
        ids, choice_logprobs = choice.get("token_ids"), numbers(choice)
        if type(ids) is not list or type(choice_logprobs) is not list or not ids or len(ids) != len(choice_logprobs):
            return None
        if choice.get("prompt_token_ids") is not None or "prompt_text" in choice or "routed_experts" in choice:
            return None
        responses.append(ids)
        logprobs.append(choice_logprobs)
        sizes.append(len(ids))
    versions = _column_versions(answer)
    if versions is None or not choices:
        return None
    try:
        tokens = array("i", chain.from_iterable(chain(prompt, ids) for ids in responses))
        flat_logprobs = np.frombuffer(array("d", chain.from_iterable(logprobs)))
    except (TypeError, OverflowError):  # the fault of one choice: the choice-by-choice path reports it
        return None
    if not LEAST_LOGPROB < flat_logprobs.min() <= flat_logprobs.max() < LARGEST_LOGPROB:  # also false for NaN
        return None
    divisor, length, count = sampling_temperature(temperature or 1.0), len(prompt), len(choices)
    columns: dict[str, Iterable[Any]] = {
        "eid": new_eids(count),
        "tokens": _split(torch.frombuffer(tokens, dtype=torch.int32), [length + size for size in sizes]),
        "logprobs": _split(torch.from_numpy(flat_logprobs.astype(np.float32)), sizes),
        "action_mask": _split(torch.ones(len(flat_logprobs), dtype=torch.bool), sizes),
        "response_text": map(text_of, choices),
        "truncate_status": [None if choice.get("finish_reason") in WHOLE else RESPONSE_TRUNCATED for choice in choices],
        "versions": versions,
        "prompt_length": repeat(length),
        "prompt_text": repeat(prompt_text),
        "temperature": repeat(divisor),
        "experience_type": repeat(SINGLE_TURN),
        "info": [{} for _ in choices],
        "metrics": list(map(_malformed, choices)),
        "custom_fields": [[] for _ in choices],
    }
    return list(map(Experience.from_valid_fields, *(columns.get(name, _NONE) for name in FIELD_NAMES)))


def _split(flat: Tensor, sizes: list[int]) -> Any:
    # "unsafe" concerns only autograd, which is not used here; the views are the same and cost less
    return torch.unsafe_split_with_sizes(flat, sizes)


def _column_versions(answer: Mapping[str, Any]) -> list[Versions | None] | None:
    """Return the versions of each choice, None for a choice without versions.

    Return None for the whole answer if the versions do not have the usual form: whole numbers in rows of three, with
    one row per choice that starts at its first token.
    """
    stated = answer.get("weight_version")
    if stated is not None and not (type(stated) is list and len(stated) == 2 and _are_counts(stated)):
        return None
    versions: list[Versions | None] = []
    last: Any = None
    stamp = (0, 0, 0)
    for choice in answer["choices"]:
        rows = choice.get("weight_versions")
        if not rows:
            versions.append(None if stated is None else [(0, stated[0], stated[1])])
            continue
        if rows != last:
            if type(rows) is not list or len(rows) != 1 or type(rows[0]) is not list or len(rows[0]) != 3:
                return None
            if rows[0][0] != 0 or not _are_counts(rows[0]):
                return None
            last, stamp = rows, (0, rows[0][1], rows[0][2])
        versions.append([stamp])
    return versions


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
