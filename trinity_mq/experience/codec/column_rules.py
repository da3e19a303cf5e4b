"""Checks the rules of rules.py for whole columns at once. The error text comes from the check for one experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.fields import RESPONSE_FIELDS, ExperienceError, sampling_temperature
from trinity_mq.experience.ragged import Column, Indexes, column_lengths, equal, least
from trinity_mq.experience.rules import (
    DPO,
    PROMPT_TRUNCATED,
    TRUNCATE_STATUSES,
    TYPES,
    Versions,
    check_lengths,
    check_versions,
)

Tensors = dict[str, Column]
"""Tensor columns by name, without columns that are None in all experiences."""


_TYPES, _STATUSES = frozenset(TYPES), frozenset(TRUNCATE_STATUSES)

NO_RESPONSE = np.iinfo(np.int64).max
"""Response length of an experience without a single response; larger than any real length."""


def check_columns(values: PlainColumns, tensors: Tensors, count: int) -> None:
    """Check types, statuses, lengths and temperatures of ``count`` experiences, and that all have tokens.

    Raises:
        ExperienceError: A rule is broken. For a rule of :func:`check_lengths` the message has the index of the first
            bad experience.
    """
    kinds, prompts = values.get("experience_type", [None]), values.get("prompt_length", [None])
    statuses = values.get("truncate_status") or [None] * count
    if not _TYPES.issuperset(kinds) or not _STATUSES.issuperset(statuses):
        raise ExperienceError(
            f"experience_type {set(kinds)} and truncate_status {set(statuses)}, wanted only {TYPES} and "
            f"{TRUNCATE_STATUSES}"
        )
    if None in prompts:
        raise ExperienceError("prompt_length is None, wanted a whole number")
    lengths = {name: column_lengths(column) for name, column in tensors.items()}
    if "tokens" not in lengths or least(lengths["tokens"]) < 0:
        raise ExperienceError("tokens is None in an experience, wanted token ids")
    check_batch(kinds, statuses, prompts, lengths)
    for temperature in set(values.get("temperature", ())) - {None}:
        sampling_temperature(temperature)


def first_bad(
    kinds: Sequence[str], statuses: Sequence[str | None], prompts: Indexes, lengths: Mapping[str, Indexes]
) -> int | None:
    """Return the index of the first experience that breaks a rule of :func:`check_lengths`; None if all are valid.

    Args:
        kinds: Type of each experience.
        statuses: Truncate status of each experience.
        prompts: Prompt length of each experience in tokens.
        lengths: First dimension of each tensor field, -1 for a missing tensor. Fields that all experiences lack may be
            left out.
    """
    tokens, mask = lengths["tokens"], lengths.get("action_mask")
    if mask is not None and DPO not in kinds and PROMPT_TRUNCATED not in statuses:
        response = tokens - prompts
        columns = (lengths[name] for name in RESPONSE_FIELDS if name in lengths)
        if (
            "routed_experts" not in lengths
            and least(prompts) >= 1
            and least(response) >= 1
            and all(column is mask or equal(column, response) for column in columns)
            and equal(mask, response)
        ):
            return None  # fast path for most batches
    absent = np.full(len(kinds), -1, dtype=np.int64)
    mask = absent if mask is None else mask
    dpo, prompt_cut = _are(kinds, DPO), _are(statuses, PROMPT_TRUNCATED)
    response = np.where(prompt_cut, mask, tokens - prompts)
    bad = (prompts < 1) | (tokens < 1) | (~dpo & ((mask < 0) | (~prompt_cut & (response < 1))))
    if dpo.any():
        chosen, rejected = lengths.get("chosen", absent), lengths.get("rejected", absent)
        bad |= dpo & ((prompts != tokens) | (chosen < 1) | (rejected < 1))
    for name in RESPONSE_FIELDS:
        if name in lengths:
            bad |= (lengths[name] >= 0) & (dpo | (lengths[name] != response))
    if "routed_experts" in lengths:
        bad |= (lengths["routed_experts"] >= 0) & (lengths["routed_experts"] != tokens - 1)
    return int(bad.argmax()) if bad.any() else None


def check_batch(
    kinds: Sequence[str], statuses: Sequence[str | None], prompts: Sequence[int], lengths: Mapping[str, Indexes]
) -> None:
    """Check many experiences at once; arguments as :func:`first_bad`.

    Raises:
        ExperienceError: As :func:`check_lengths`, with the index of the first bad experience.
    """
    index = first_bad(kinds, statuses, np.array(prompts, dtype=np.int64), lengths)
    if index is None:
        return
    present = {name: int(column[index]) for name, column in lengths.items() if column[index] >= 0}
    try:
        check_lengths(kinds[index], statuses[index], prompts[index], {"tokens": 0, **present})
    except ExperienceError as error:
        raise ExperienceError(f"experience {index}: {error}") from error


def responses_of(kinds: Sequence[str], tensors: Tensors) -> Indexes:
    """Return the number of response tokens of each experience, :data:`NO_RESPONSE` without a single response (dpo)."""
    if "action_mask" not in tensors:
        return np.full(len(kinds), NO_RESPONSE)
    lengths = column_lengths(tensors["action_mask"])
    if DPO not in kinds and least(lengths) >= 0:
        return lengths
    return np.where(_are(kinds, DPO) | (lengths < 0), NO_RESPONSE, lengths)


def _are(column: Sequence[Any], value: str) -> npt.NDArray[np.bool_]:
    if value not in column:
        return np.zeros(len(column), dtype=np.bool_)
    return np.fromiter((item == value for item in column), dtype=np.bool_, count=len(column))


def check_all_versions(column: Sequence[Any], responses: Indexes) -> list[Versions | None]:
    """Return a column of versions, each in the form that :func:`check_versions` returns.

    Args:
        column: Rows ``(first token, generation, step)`` of each experience, or None.
        responses: Response lengths from :func:`responses_of`.

    Raises:
        ExperienceError: As :func:`check_versions`.
    """
    if set(map(type, column)) <= {list, NoneType}:
        rows = list(chain.from_iterable(filter(None, column)))
        if set(map(type, rows)) <= {tuple} and set(map(len, rows)) <= {3}:
            ints = set(map(type, chain.from_iterable(rows))) <= {int}
            if ints and are_versions_valid(column, responses):
                return [rows or None for rows in column]
    limits = [None if size == NO_RESPONSE else size for size in responses.tolist()]
    return [check_versions(rows, limit) for rows, limit in zip(column, limits, strict=True)]


def are_versions_valid(column: Sequence[Versions | None], responses: Indexes) -> bool:
    """Return whether rows of three whole numbers keep the rules of :func:`check_versions`; arguments as for
    :func:`check_all_versions`.
    """
    for rows, response in zip(column, responses.tolist(), strict=True):
        if not rows:
            continue
        previous = -1
        for start, generation, step in rows:
            if start <= previous or generation < 0 or step < 0:
                return False
            previous = start
        if rows[0][0] or (previous and previous >= response):
            return False
    return True
