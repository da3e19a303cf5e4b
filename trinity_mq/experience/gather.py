"""Experiences to padded rectangles: prompts padded on the left, responses on the right.

All responses begin in one column: with ``P = max_prompt_length`` and ``R = max_response_length`` a row is
``[pad ... prompt | response ... pad]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trinity_mq.experience.experience import Experience


def gather_token_ids(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int, pad_token_id: int
) -> Tensor:
    """Return the token ids as ``[experiences, P + R]``, int32.

    Raises:
        ValueError: No experiences, or a prompt or response is longer than its maximum.
    """
    covered = gather_attention_masks(experiences, max_prompt_length, max_response_length)
    flat = torch.cat([experience.tokens for experience in experiences])
    result = flat.new_full(covered.shape, pad_token_id)
    result[covered] = flat
    return result


def gather_attention_masks(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int
) -> Tensor:
    """Return bool ``[experiences, P + R]``, True where a token of the experience is.

    Raises:
        ValueError: As :func:`gather_token_ids`.
    """
    _some(experiences)
    for number, experience in enumerate(experiences):
        prompt = experience.prompt_length
        response = experience.tokens.shape[0] - prompt
        if prompt > max_prompt_length or response > max_response_length:
            what, length, limit = (
                ("prompt", prompt, max_prompt_length)
                if prompt > max_prompt_length
                else ("response", response, max_response_length)
            )
            raise ValueError(
                f"experience {number} ({experience.eid.uid}) has a {what} of {length} tokens, wanted at most "
                f"max_{what}_length = {limit}; raise it, or drop or truncate such experiences"
            )
    device = experiences[0].tokens.device
    starts = torch.tensor([max_prompt_length - item.prompt_length for item in experiences], device=device)
    sizes = torch.tensor([item.tokens.shape[0] for item in experiences], device=device)
    return _between(starts, starts + sizes, max_prompt_length + max_response_length)


def gather_action_masks(experiences: Sequence[Experience], max_response_length: int) -> Tensor:
    """Return the action masks as bool ``[experiences, R]``, False where padded.

    Raises:
        ValueError: As :func:`gather_response_attrs`.
    """
    return gather_response_attrs(experiences, "action_mask", max_response_length)


def gather_response_attrs(
    experiences: Sequence[Experience], attr_name: str, max_response_length: int, pad_value: int = 0
) -> Tensor:
    """Return a response field, such as ``logprobs``, as ``[experiences, R]``.

    The dtype is that of the field; where experiences differ in it, the one that holds both (torch's promotion).

    Raises:
        ValueError: No experiences, no such field, one of them has none, or one is longer than R.
    """
    _some(experiences)
    columns: list[Tensor] = []
    for number, experience in enumerate(experiences):
        value = getattr(experience, attr_name, None)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise ValueError(
                f"experience {number} ({experience.eid.uid}, {experience.experience_type}) has no {attr_name}, wanted "
                "one value per response token"
            )
        if value.shape[0] > max_response_length:
            raise ValueError(
                f"experience {number} ({experience.eid.uid}) has {value.shape[0]} values in {attr_name}, wanted at "
                f"most max_response_length = {max_response_length}; raise it, or drop or truncate such experiences"
            )
        columns.append(value)
    flat = torch.cat(columns)
    sizes = torch.tensor([column.shape[0] for column in columns], device=flat.device)
    result = flat.new_full((len(columns), max_response_length), pad_value)
    result[_between(torch.zeros_like(sizes), sizes, max_response_length)] = flat
    return result


def gather_multi_modal_inputs(experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
    """Return for each multi-modal input the tensors of all experiences, unpadded since their shapes differ.

    Raises:
        ValueError: No experiences, or not all have the same inputs.
    """
    _some(experiences)
    inputs = [experience.multi_modal_inputs or {} for experience in experiences]
    for number, item in enumerate(inputs):
        if item.keys() != inputs[0].keys():
            raise ValueError(
                f"experience {number} ({experiences[number].eid.uid}) has multi_modal_inputs {sorted(item)}, wanted "
                f"{sorted(inputs[0])} as in the first"
            )
    return {key: [item[key] for item in inputs] for key in inputs[0]}


def _some(experiences: Sequence[Experience]) -> None:
    if not experiences:
        raise ValueError("got no experiences, wanted at least one: an empty batch has no dtype and no width; skip it")


def _between(starts: Tensor, ends: Tensor, width: int) -> Tensor:
    """Return bool ``[rows, width]``, True in the columns from each row's start up to its end."""
    columns = torch.arange(width, device=starts.device)
    return (columns >= starts[:, None]) & (columns < ends[:, None])
