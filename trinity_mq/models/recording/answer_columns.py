"""Converts all answers to one prompt to experiences at once: their tokens are slices of one array."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.eid import new_eids
from trinity_mq.experience.fields import sampling_temperature
from trinity_mq.experience.record import FIELD_NAMES
from trinity_mq.experience.rules import RESPONSE_TRUNCATED, SINGLE_TURN, Versions
from trinity_mq.models.recording.sse import numbers

LEAST_LOGPROB, LARGEST_LOGPROB = -9999.0, 1e30
"""A logprob outside these limits does not belong to a sampled token. vLLM writes the lower limit for minus infinity."""
WHOLE = frozenset({"stop", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of a response that ended by itself."""

_NONE = repeat(None)


def experiences_from_columns(
    answer: Mapping[str, Any], temperature: float, text_of: Callable[[Mapping[str, Any]], str]
) -> list[Experience] | None:
    """Return the experiences of an answer whose choices share a prompt and are complete, as
    :func:`trinity_mq.models.recording.responses.experiences_of` does. Return None for any other answer, which the
    caller converts choice by choice.

    All checks of the Experience constructor are done here, for all choices at once. The experiences share no memory
    that is written to, although their tensors are slices of the same arrays.

    Args:
        answer: JSON body with ``choices``.
        temperature: Requested temperature.
        text_of: Returns the text of a choice.

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
        if choice.get("prompt_token_ids") is not None or "prompt_text" in choice:
            return None
        responses.append(ids)
        logprobs.append(choice_logprobs)
        sizes.append(len(ids))
    versions = _versions(answer)
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
        "metrics": [{} for _ in choices],
        "custom_fields": [[] for _ in choices],
    }
    return list(map(Experience.from_valid_fields, *(columns.get(name, _NONE) for name in FIELD_NAMES)))


def _split(flat: Tensor, sizes: list[int]) -> Any:
    # "unsafe" concerns only autograd, which is not used here; the views are the same and cost less
    return torch.unsafe_split_with_sizes(flat, sizes)


def _versions(answer: Mapping[str, Any]) -> list[Versions | None] | None:
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
