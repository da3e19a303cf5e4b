"""Rules for the combinations of an experience's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.fields import RESPONSE_FIELDS, ExperienceError, short_repr, whole

SINGLE_TURN = "single_turn"
MULTI_TURN = "multi_turn"
DPO = "dpo"
TYPES = (SINGLE_TURN, MULTI_TURN, DPO)

PROMPT_TRUNCATED = "prompt_truncated"
RESPONSE_TRUNCATED = "response_truncated"
ENGINE = "engine"
"""Key in ``info``: id of the engine that sampled the response."""
CHOSEN_MASK, REJECTED_MASK = "chosen_mask", "rejected_mask"
"""Keys in ``info`` of a dpo experience: one boolean per token of the answer, True for a token that counts. Without a
mask every token counts.
"""
REWARD_FAULT = "reward_fault"
"""Key in ``info``: the reason why the reward is not a finite number."""
TRUNCATE_STATUSES = (None, PROMPT_TRUNCATED, RESPONSE_TRUNCATED)

Versions = list[tuple[int, int, int]]
"""Rows ``(first token in the response, generation, step)``: from that token on, this policy version sampled."""


def check_lengths(kind: str, truncate_status: str | None, prompt_length: int, lengths: Mapping[str, int]) -> None:
    """Check the lengths of the fields of one experience.

    Args:
        kind: One of :data:`TYPES`.
        truncate_status: One of :data:`TRUNCATE_STATUSES`. A truncated prompt leaves no real response: the response
            fields then only have to agree with the mask.
        prompt_length: Number of tokens before the response.
        lengths: First dimension of each present tensor field.

    Raises:
        ExperienceError: A rule is broken; the message names the field, its value and the rule.
    """
    tokens = lengths["tokens"]
    if prompt_length < 1:
        raise ExperienceError(
            f"prompt_length is {prompt_length}, wanted at least 1: the first token of a sequence has no logprob"
        )
    if tokens < 1:
        raise ExperienceError("tokens is empty, wanted at least one token id")
    experts = lengths.get("routed_experts")
    if experts is not None and experts != tokens - 1:
        raise ExperienceError(f"routed_experts has {experts} rows, wanted len(tokens) - 1 = {tokens - 1}")
    if kind == DPO:
        _check_dpo(prompt_length, lengths)
        return
    if "action_mask" not in lengths:
        raise ExperienceError(f"action_mask is None, wanted one value per response token in a {kind} experience")
    if truncate_status == PROMPT_TRUNCATED:
        response, rule = lengths["action_mask"], "len(action_mask)"
    else:
        response, rule = tokens - prompt_length, f"len(tokens) - prompt_length = {tokens} - {prompt_length}"
        if response < 1:
            raise ExperienceError(
                f"tokens has {tokens} token ids with prompt_length {prompt_length}, wanted more tokens than the prompt "
                f"in a {kind} experience; tokens holds the prompt and the response"
            )
    for name in RESPONSE_FIELDS:
        if name in lengths and lengths[name] != response:
            raise ExperienceError(
                f"{name} has {lengths[name]} values, wanted one per response token: {rule}"
                + (f" = {response}" if rule == "len(action_mask)" else f" = {response} in a {kind} experience")
            )


def _check_dpo(prompt_length: int, lengths: Mapping[str, int]) -> None:
    tokens = lengths["tokens"]
    if prompt_length != tokens:
        raise ExperienceError(f"prompt_length is {prompt_length}, wanted len(tokens) = {tokens} in a dpo experience")
    for name in ("chosen", "rejected"):
        if lengths.get(name, 0) < 1:
            raise ExperienceError(f"{name} is empty or None, wanted the token ids of a response in a dpo experience")
    for name in RESPONSE_FIELDS:
        if name in lengths:
            raise ExperienceError(
                f"{name} has {lengths[name]} values, wanted None: a dpo experience has two responses, chosen and "
                "rejected; split_dpo_experience_to_single_turn gives one experience for each"
            )


def check_versions(value: Any, response: int | None) -> Versions | None:
    """Return the run-length column of policy versions as a list of tuples; None without rows.

    Args:
        value: Rows ``(first token, generation, step)``; the first row starts at token 0, starts rise.
        response: Number of response tokens; None if the experience has two responses (dpo).

    Raises:
        ExperienceError: A rule is broken; the message names the row and the rule.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ExperienceError(f"versions is {short_repr(value)}, wanted a list of (first token, generation, step)")
    rows: Versions = []
    previous = -1
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise ExperienceError(f"versions holds {short_repr(row)}, wanted rows (first token, generation, step)")
        first, generation, step = (part if type(part) is int else whole("versions", part) for part in row)
        if (not rows and first != 0) or first <= previous or (response is not None and first >= max(response, 1)):
            raise ExperienceError(
                f"versions has a row that starts at token {first} after {previous if rows else 'none'}, wanted the "
                f"first row at 0, rising starts and all inside the response of {response} tokens"
            )
        if generation < 0 or step < 0:
            raise ExperienceError(f"versions holds generation {generation}, step {step}, wanted both at least 0")
        rows.append((first, generation, step))
        previous = first
    return rows or None


PLAIN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("response_text", "prompt_text", "taskset"), str),
    **dict.fromkeys(("messages", "tools", "chosen_messages", "rejected_messages"), list),
}
"""Fields that are stored unchanged, with their type."""


def checked_plain(field: str, value: object, kind: type) -> Any:
    """Return ``value`` if it is of type ``kind`` or None.

    Raises:
        ExperienceError: ``value`` is of another type.
    """
    if value is not None and not isinstance(value, kind):
        raise ExperienceError(f"{field} is {short_repr(value)}, wanted a {kind.__name__} or None")
    return value


def as_eid(value: object) -> EID:
    """Return a new id for None, or the id that a mapping describes."""
    if value is None:
        return EID()
    if not isinstance(value, Mapping):
        raise ExperienceError(f"eid is {short_repr(value)}, wanted an EID, a mapping of its parts or None")
    try:
        return EID(**value)
    except TypeError as error:
        raise ExperienceError(f"eid is {short_repr(value)}, wanted only batch, task, run, step and suffix") from error


def tensors_by_name(value: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return multi-modal inputs as tensors."""
    try:
        return {key: item if isinstance(item, Tensor) else torch.tensor(item) for key, item in value.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ExperienceError(f"multi_modal_inputs is {short_repr(value)}, wanted tensors by name: {error}") from error


def stored_type(arguments: Mapping[str, Any]) -> str | None:
    """Return the type of an experience that Trinity-RFT stored without its type. Without an action mask return None,
    which leaves the type to the constructor.

    Trinity-RFT fills in the action mask of single-turn experiences. An experience is read as ``single_turn`` if its
    mask equals that default: all true, one per response token, or, for a truncated prompt, all false, one per logprob.
    With any other mask, or with ``chosen`` and ``rejected``, it is ``multi_turn``. Therefore a multi-turn experience
    whose tokens are all trained on is read as ``single_turn``, which trains the same.

    Args:
        arguments: Arguments of the constructor, with tensors.
    """
    tokens, mask, logprobs = (arguments.get(name) for name in ("tokens", "action_mask", "logprobs"))
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.dim() != 1 or tokens.dim() != 1:
        return None
    if arguments.get("chosen") is not None and arguments.get("rejected") is not None:
        return MULTI_TURN
    if arguments.get("truncate_status") == PROMPT_TRUNCATED:
        filled = isinstance(logprobs, Tensor) and mask.shape == logprobs.shape and not bool(mask.any())
    else:
        filled = len(mask) == len(tokens) - whole("prompt_length", arguments.get("prompt_length", 1)) and bool(
            mask.all()
        )
    return SINGLE_TURN if filled else MULTI_TURN
