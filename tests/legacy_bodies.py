"""Bodies as Trinity 0.6 wrote them, made from the facts alone: a writer of ``TRXP``, and stand-ins to pickle."""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import safetensors.torch
import torch

MODULE = "trinity.common.experience"
TENSORS = (
    *("tokens", "logprobs", "token_level_reward", "advantages", "returns", "action_mask", "chosen", "rejected"),
    *("teacher_logprobs", "routed_experts"),
)
TEXTS = ("response_text", "prompt_text", "messages", "tools", "chosen_messages", "rejected_messages")
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("reward", "truncate_status")),
    "info": {},
    "metrics": {},
    "prompt_length": 1,
    **dict.fromkeys(TEXTS),
}


@dataclass
class EID:
    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = "abc123"


@dataclass(frozen=True)
class CustomField:
    source_field: str
    destination_field: str
    data_type: torch.dtype


@dataclass
class Experience:
    tokens: Any
    eid: Any = field(default_factory=EID)
    experience_type: str = "single_turn"
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        more = self.__dict__.pop("more")
        fields = {**dict.fromkeys(TENSORS), **PLAIN, "multi_modal_inputs": None, "custom_fields": []}
        self.__dict__ = fields | self.__dict__ | more


for _class in (EID, CustomField, Experience):
    _class.__module__ = MODULE


@contextmanager
def reference_importable() -> Iterator[None]:
    """Make the classes above importable under the names they have in the reference."""
    module = ModuleType(MODULE)
    vars(module).update({item.__name__: item for item in (EID, CustomField, Experience)})
    names = {name: ModuleType(name) for name in ("trinity", "trinity.common")}
    with mock.patch.dict(sys.modules, {**names, MODULE: module}):
        yield


def bare(value: Any, protocol: int = 4) -> bytes:
    """Return a bare pickle."""
    with reference_importable():
        return pickle.dumps(value, protocol=protocol)


def trxp(*experiences: dict[str, Any]) -> bytes:
    """Return a ``TRXP`` body; each experience is its fields by name, tensors and others alike."""
    items, tensors = [], {}
    for number, fields in enumerate(experiences):
        pixels = fields.get("multi_modal_inputs") or {}
        tensors |= {f"{number}:{name}": fields[name] for name in TENSORS if fields.get(name) is not None}
        tensors |= {f"{number}:multi_modal_inputs:{key}": value for key, value in pixels.items()}
        items.append(
            {name: fields.get(name, default) for name, default in PLAIN.items()}
            | {
                "eid": fields.get("eid", vars(EID())),
                "custom_fields": fields.get("custom_fields", []),
                "multi_modal_input_keys": list(pixels),
            }
            | fields.get("further", {})
        )
    metadata = {"version": 1, "num_items": len(items), "items": items}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors refuses shared storage
    return sealed(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL), safetensors.torch.save(tensors))


def sealed(metadata: bytes, tensors: bytes | None = None) -> bytes:
    """Return a ``TRXP`` body around whatever metadata and tensors."""
    tensors = safetensors.torch.save({}) if tensors is None else tensors
    return b"TRXP" + struct.pack("<BQQ", 1, len(metadata), len(tensors)) + metadata + tensors
