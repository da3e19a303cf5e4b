"""The answers to one prompt as experiences, made together: their tokens are one array, of which each has its part."""

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
"""A logprob between these is that of a token that was sampled: the lower one is what vLLM writes for minus infinity."""
WHOLE = frozenset({"stop", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of a response that ended by itself."""

_NONE = repeat(None)


def experiences_at_once(
    answer: Mapping[str, Any], temperature: float, text_of: Callable[[Mapping[str, Any]], str]
) -> list[Experience] | None:
    """Return what :func:`trinity_mq.models.recording.responses.experiences_of` makes of an answer whose choices share a
    prompt and are complete; None for any other, which is to be looked at choice by choice.

    Everything that the constructor of an experience checks is checked here, for all choices at once. The experiences
    share no memory that is written to, although their tensors are parts of the same arrays.

    Args:
        answer: With ``choices``.
        temperature: As requested.
        text_of: Returns the text of a choice.

    Raises:
        ExperienceError: The temperature is none.
    """
    choices, prompt, prompt_text = answer["choices"], answer.get("prompt_token_ids"), answer.get("prompt_text")
    if not prompt or type(prompt) is not list or not (prompt_text is None or type(prompt_text) is str):
        return None
    responses: list[list[int]] = []
    logprobs: list[Any] = []
    sizes: list[int] = []
    for choice in choices:
        ids, found = choice.get("token_ids"), numbers(choice)
        if type(ids) is not list or type(found) is not list or not ids or len(ids) != len(found):
            return None
        if choice.get("prompt_token_ids") is not None or "prompt_text" in choice:
            return None
        responses.append(ids)
        logprobs.append(found)
        sizes.append(len(ids))
    versions = _versions(answer)
    if versions is None or not choices:
        return None
    try:
        tokens = array("i", chain.from_iterable(chain(prompt, ids) for ids in responses))
        given = np.frombuffer(array("d", chain.from_iterable(logprobs)))
    except (TypeError, OverflowError):  # of one choice: what it is depends on which
        return None
    if not LEAST_LOGPROB < given.min() <= given.max() < LARGEST_LOGPROB:  # NaN is not
        return None
    heat, length, count = sampling_temperature("temperature", temperature or 1.0), len(prompt), len(choices)
    columns: dict[str, Iterable[Any]] = {
        "eid": new_eids(count),
        "tokens": _split(torch.frombuffer(tokens, dtype=torch.int32), [length + size for size in sizes]),
        "logprobs": _split(torch.from_numpy(given.astype(np.float32)), sizes),
        "action_mask": _split(torch.ones(len(given), dtype=torch.bool), sizes),
        "response_text": map(text_of, choices),
        "truncate_status": [None if one.get("finish_reason") in WHOLE else RESPONSE_TRUNCATED for one in choices],
        "versions": versions,
        "prompt_length": repeat(length),
        "prompt_text": repeat(prompt_text),
        "temperature": repeat(heat),
        "experience_type": repeat(SINGLE_TURN),
        "info": [{} for _ in choices],
        "metrics": [{} for _ in choices],
        "custom_fields": [[] for _ in choices],
    }
    return list(map(Experience.from_checked, *(columns.get(name, _NONE) for name in FIELD_NAMES)))


def _split(flat: Tensor, sizes: list[int]) -> Any:
    # "unsafe" only for autograd, which has no part in this; the views are the same and cost less
    return torch.unsafe_split_with_sizes(flat, sizes)


def _versions(answer: Mapping[str, Any]) -> list[Versions | None] | None:
    """Return the versions of each choice, None for none; None in place of all where one is not of the usual form: whole
    numbers in rows of three, of which each choice has one, from its first token on.
    """
    whole = answer.get("weight_version")
    if whole is not None and not (type(whole) is list and len(whole) == 2 and _are_counts(whole)):
        return None
    found: list[Versions | None] = []
    last: Any = None
    stamp = (0, 0, 0)
    for choice in answer["choices"]:
        rows = choice.get("weight_versions")
        if not rows:
            found.append(None if whole is None else [(0, whole[0], whole[1])])
            continue
        if rows != last:
            if type(rows) is not list or len(rows) != 1 or type(rows[0]) is not list or len(rows[0]) != 3:
                return None
            if rows[0][0] != 0 or not _are_counts(rows[0]):
                return None
            last, stamp = rows, (0, rows[0][1], rows[0][2])
        found.append([stamp])
    return found


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
