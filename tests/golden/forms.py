"""The JSON form of what a golden body holds (schemas/README.md), made with nothing of the codecs under test."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from trinity_mq.experience import CustomField, Experience

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
CONTROL, EXPERIENCES = GOLDEN / "control", GOLDEN / "experiences"
SUMS = GOLDEN / "SHA256SUMS"

SAFE = 2**53
"""From here on JavaScript's numbers skip whole ones, so they are written as text."""

TENSORS = (
    *("tokens", "chosen", "rejected", "logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"),
    *("action_mask", "routed_experts"),
)
OPTIONAL = (
    *("reward", "truncate_status", "response_text", "prompt_text", "messages", "tools", "chosen_messages"),
    *("rejected_messages", "versions", "temperature", "taskset", "index"),
)


def form(value: Any) -> Any:
    """Return ``value`` in JSON's types."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return value if abs(value) < SAFE else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [form(item) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor_form(value)}
    if isinstance(value, np.ndarray):
        return {"$array": tensor_form(torch.from_numpy(np.array(value)))}
    if isinstance(value, msgpack.Timestamp):
        return {"$timestamp": {"seconds": value.seconds, "nanoseconds": value.nanoseconds}}
    raise TypeError(f"no JSON form for {type(value)}")


def tensor_form(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype, shape and the values in row-major order."""
    flat = [tensor[index].item() for index in np.ndindex(*tensor.shape)]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": form(flat)}


def experience_form(experience: Experience) -> dict[str, Any]:
    """Return one experience; optional fields that are absent are left out."""
    eid = experience.eid
    result: dict[str, Any] = {
        "eid": {"batch": eid.batch, "task": eid.task, "run": eid.run, "step": eid.step, "suffix": eid.suffix},
        "experience_type": experience.experience_type,
        "prompt_length": experience.prompt_length,
    }
    for name in OPTIONAL:
        if getattr(experience, name) is not None:
            result[name] = form(getattr(experience, name))
    result["info"], result["metrics"] = form(experience.info), form(experience.metrics)
    if experience.custom_fields:
        result["custom_fields"] = [custom_form(item) for item in experience.custom_fields]
    tensors = {name: getattr(experience, name) for name in TENSORS}
    result["tensors"] = {name: tensor_form(tensor) for name, tensor in tensors.items() if tensor is not None}
    if experience.multi_modal_inputs is not None:
        inputs = sorted(experience.multi_modal_inputs.items())
        result["multi_modal_inputs"] = {name: tensor_form(tensor) for name, tensor in inputs}
    return result


def custom_form(item: CustomField) -> list[str]:
    return [item.source_field, item.destination_field, str(item.data_type).removeprefix("torch.")]


def batch_form(experiences: list[Experience]) -> dict[str, Any]:
    return {"n": len(experiences), "experiences": [experience_form(item) for item in experiences]}


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
