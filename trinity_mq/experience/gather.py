"""Converts experiences to padded tensors: prompts padded on the left, responses on the right.

All responses begin in the same column: with ``P = max_prompt_length`` and ``R = max_response_length`` a row is ``[pad
... prompt | response ... pad]``. The functions take a list of experiences or an :class:`ExperienceBatch`, whose columns
they use directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience.batch import ExperienceBatch
from trinity_mq.experience.fields import TENSOR_FIELDS
from trinity_mq.experience.ragged import column_items
from trinity_mq.experience.record import Experience


def gather_token_ids(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int, pad_token_id: int
) -> Tensor:
    """Return the token ids as ``[experiences, P + R]``, int32.

    Raises:
        ValueError: The input is empty, or a prompt or response is longer than its maximum.
    """
    prompts, sizes = _checked_sizes(experiences, max_prompt_length, max_response_length)
    rows = _present(_items(experiences, "tokens"))
    starts = [max_prompt_length - prompt for prompt in prompts]
    return _padded(rows, starts, sizes, max_prompt_length + max_response_length, pad_token_id)


def gather_attention_masks(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int
) -> Tensor:
    """Return bool ``[experiences, P + R]``, True at the tokens of the experience.

    Raises:
        ValueError: As :func:`gather_token_ids`.
    """
    prompts, sizes = _checked_sizes(experiences, max_prompt_length, max_response_length)
    device = torch.device("cpu") if isinstance(experiences, ExperienceBatch) else experiences[0].tokens.device
    columns = torch.arange(max_prompt_length + max_response_length, device=device)
    first = max_prompt_length - torch.tensor(prompts, device=device)[:, None]
    return (columns >= first) & (columns < first + torch.tensor(sizes, device=device)[:, None])


def _checked_sizes(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int
) -> tuple[list[int], list[int]]:
    """Return prompt length and number of tokens of each experience, after a check against the maximum lengths."""
    _check_not_empty(experiences)
    if isinstance(experiences, ExperienceBatch):
        prompts, sizes = experiences.prompt_lengths().tolist(), experiences.lengths("tokens").tolist()
    else:
        prompts = [experience.prompt_length for experience in experiences]
        sizes = [experience.tokens.shape[0] for experience in experiences]
    for number, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        for what, length, limit in (
            ("prompt", prompt, max_prompt_length),
            ("response", size - prompt, max_response_length),
        ):
            if length > limit:
                raise ValueError(
                    f"experience {number} ({experiences[number].eid.uid}) has a {what} of {length} tokens, wanted at "
                    f"most max_{what}_length = {limit}; raise it, or drop or truncate such experiences"
                )
    return prompts, sizes


def gather_action_masks(experiences: Sequence[Experience], max_response_length: int) -> Tensor:
    """Return the action masks as bool ``[experiences, R]``, False on padding.

    Raises:
        ValueError: As :func:`gather_response_attrs`.
    """
    return gather_response_attrs(experiences, "action_mask", max_response_length)


def gather_response_attrs(
    experiences: Sequence[Experience], attr_name: str, max_response_length: int, pad_value: int = 0
) -> Tensor:
    """Return a response field, such as ``logprobs``, as ``[experiences, R]``.

    The dtype is the field's dtype. If it differs between experiences, the dtype that holds all values is used (torch's
    promotion).

    Raises:
        ValueError: The input is empty, the field is unknown, missing in an experience, or longer than R.
    """
    _check_not_empty(experiences)
    values = _items(experiences, attr_name)
    sizes = [item.shape[0] if isinstance(item, Tensor) and item.dim() == 1 else -1 for item in values]
    for number, size in enumerate(sizes):
        if not 0 <= size <= max_response_length:
            experience = experiences[number]
            name = f"experience {number} ({experience.eid.uid}, {experience.experience_type})"
            if size < 0:
                raise ValueError(f"{name} has no {attr_name}, wanted one value per response token")
            raise ValueError(
                f"{name} has {size} values in {attr_name}, wanted at most max_response_length = {max_response_length}; "
                "raise it, or drop or truncate such experiences"
            )
    return _padded(_present(values), [0] * len(sizes), sizes, max_response_length, pad_value)


def gather_multi_modal_inputs(experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
    """Return for each multi-modal input the tensors of all experiences. They are not padded, because their shapes
    differ.

    Raises:
        ValueError: The input is empty, or not all experiences have the same multi-modal inputs.
    """
    _check_not_empty(experiences)
    if isinstance(experiences, ExperienceBatch):
        columns = {key: column_items(column, len(experiences)) for key, column in experiences.columns()[2].items()}
        tensors_by_key = {key: [item for item in column if item is not None] for key, column in columns.items()}
        if all(len(items) == len(experiences) for items in tensors_by_key.values()):
            return tensors_by_key
    inputs = [experience.multi_modal_inputs or {} for experience in experiences]
    keys = inputs[0].keys()
    for number, item in enumerate(inputs):
        if item.keys() != keys:
            raise ValueError(
                f"experience {number} ({experiences[number].eid.uid}) has multi_modal_inputs {sorted(item)}, wanted "
                f"{sorted(keys)} as in the first"
            )
    return {key: [item[key] for item in inputs] for key in keys}


def gather_custom_fields(experiences: Sequence[Experience]) -> dict[str, Tensor]:
    """Return the custom fields of the experiences by destination: ``info[source_field]`` of each experience, stacked to
    ``[experiences, ...]`` with the field's ``data_type``. Empty if no experience has custom fields.

    Raises:
        ValueError: Not all experiences have the same custom fields, or a value is missing, is not a number, or has
            another shape.
    """
    if isinstance(experiences, ExperienceBatch):
        fields, infos = experiences.values("custom_fields"), experiences.values("info")
    else:
        fields = [experience.custom_fields for experience in experiences]
        infos = [experience.info for experience in experiences]
    if not any(fields):
        return {}
    for number, custom_fields in enumerate(fields):
        if custom_fields != fields[0]:
            raise ValueError(
                f"experience {number} ({experiences[number].eid.uid}) has custom_fields {custom_fields or []}, wanted "
                f"{fields[0] or []} as in the first: all experiences that are trained on together have the same"
            )
    stacked = {}
    for custom in fields[0]:
        lacking = [number for number, info in enumerate(infos) if custom.source_field not in (info or {})]
        if lacking:
            raise ValueError(
                f"experience {lacking[0]} ({experiences[lacking[0]].eid.uid}) has no info[{custom.source_field!r}], "
                f"which its custom field {custom.destination_field!r} is made of; set it in the workflow or in an "
                "operator"
            )
        try:
            values = [torch.as_tensor(info[custom.source_field], dtype=custom.data_type) for info in infos]
            stacked[custom.destination_field] = torch.stack(values)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"info[{custom.source_field!r}] cannot become the custom field {custom.destination_field!r} of "
                f"{custom.data_type}: {error}; wanted numbers, or arrays of one shape, in all experiences"
            ) from error
    return stacked


def _items(experiences: Sequence[Experience], name: str) -> list[Any]:
    """Return a tensor field of each experience, None for an experience without it."""
    if not isinstance(experiences, ExperienceBatch):
        return [getattr(experience, name, None) for experience in experiences]
    return column_items(experiences.column(name), len(experiences)) if name in TENSOR_FIELDS else [None]


def _check_not_empty(experiences: Sequence[Experience]) -> None:
    if not experiences:
        raise ValueError("got no experiences, wanted at least one: an empty batch has no dtype and no width; skip it")


def _present(items: Sequence[Any]) -> list[Tensor]:
    return [item for item in items if isinstance(item, Tensor)]


def _padded(rows: Sequence[Tensor], starts: Sequence[int], sizes: Sequence[int], width: int, padding: int) -> Tensor:
    """Return ``[rows, width]``: each row from its start on, with padding around it.

    Rows and the gaps between them follow each other in memory, so one concatenation suffices.
    """
    gaps, tail_gap = [], 0
    for start, size in zip(starts, sizes, strict=True):
        gaps.append(tail_gap + start)
        tail_gap = width - start - size
    gaps.append(tail_gap)
    dtype = reduce(torch.promote_types, {row.dtype for row in rows})
    fill = torch.full((sum(gaps),), padding, dtype=dtype, device=rows[0].device)
    # "unsafe" concerns only autograd, which is not used here
    blanks = torch.unsafe_split_with_sizes(fill, gaps)
    pieces = [piece for pair in zip(blanks, rows, strict=False) for piece in pair]
    return torch.cat([*pieces, blanks[-1]]).view(len(rows), width).detach()
