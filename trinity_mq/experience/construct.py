"""What the constructor of an experience does with the fields that are no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.fields import ExperienceError, short
from trinity_mq.experience.rules import DPO, MULTI_TURN, SINGLE_TURN

_PLAIN_FIELDS = (
    *((name, str) for name in ("response_text", "prompt_text", "taskset")),
    *((name, list) for name in ("messages", "tools", "chosen_messages", "rejected_messages")),
)


def decide_type(action_mask: object, chosen: object, rejected: object) -> str:
    """Return the type of an experience whose maker did not state it."""
    if action_mask is not None:
        return MULTI_TURN
    return DPO if chosen is not None and rejected is not None else SINGLE_TURN


def check_plain(values: Mapping[str, Any]) -> None:
    """Check the fields that are kept as they are given."""
    for name, kind in _PLAIN_FIELDS:
        if values[name] is not None and not isinstance(values[name], kind):
            raise ExperienceError(f"{name} is {short(values[name])}, wanted a {kind.__name__} or None")


def eid_of(value: object) -> EID:
    """Return a new id for None, or the id that a mapping describes."""
    if value is None:
        return EID()
    if not isinstance(value, Mapping):
        raise ExperienceError(f"eid is {short(value)}, wanted an EID, a mapping of its parts or None")
    try:
        return EID(**value)
    except TypeError as error:
        raise ExperienceError(f"eid is {short(value)}, wanted only batch, task, run, step and suffix") from error


def tensors_by_name(value: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return multi-modal inputs as tensors."""
    try:
        return {key: item if isinstance(item, Tensor) else torch.tensor(item) for key, item in value.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ExperienceError(f"multi_modal_inputs is {short(value)}, wanted tensors by name: {error}") from error
