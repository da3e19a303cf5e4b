"""Bodies that Trinity wrote before there was this format: ``TRXP`` version 1, and bare pickles of experiences.

``TRXP``, little-endian: magic (4), version 1 (u8), lengths of metadata and tensors (u64 each); then the metadata, a
pickle of ``{"version": 1, "num_items": n, "items": [...]}``, then a safetensors blob with entries ``index:field`` and
``index:multi_modal_inputs:key``. Both pickles are read by a machine that runs nothing (restricted_pickle.py).

``TRXP`` does not say of what type an experience was, and its writer had filled the action mask of single-turn ones.
An experience is taken for ``single_turn`` if its mask is what that writer filled in: all true, one for each response
token, or where the prompt was truncated all false, one for each logprob. With any other mask it is ``multi_turn``. So a
multi-turn experience whose tokens are all trained on comes back as ``single_turn``, which trains the same. Bare pickles
state the type.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short, whole
from trinity_mq.experience.legacy.restricted_pickle import load
from trinity_mq.experience.legacy.standins import MAX_FIELDS, Budget, OverBudgetError, Record, RecordType
from trinity_mq.experience.legacy.values import ADMITTED, CUSTOM_FIELD, DTYPES_BY_TEXT, EXPERIENCE, IDENTITY, plain
from trinity_mq.experience.record import FIELD_NAMES, CustomField, Experience
from trinity_mq.experience.rules import MULTI_TURN, PROMPT_TRUNCATED, SINGLE_TURN

MAGIC = b"TRXP"
VERSION = 1

_FRAME = struct.Struct("<4sBQQ")
_FREE_BYTES = 1 << 26
_GROWTH = 32
"""A body may unfold to ``_FREE_BYTES`` and so many times its size: objects shared in a pickle are copied."""

_EXPERIENCE_BYTES = 1 << 10

_PICKLE = b"\x80"
_OLD_PICKLES = (b"ccopy_reg\n", b"(lp0\n", b"(lp1\n", b"]q\x00(", b"]q\x00c")
"""How protocols 0 and 1 begin for an object or a list of them."""

_MULTI_MODAL = "multi_modal_inputs"
_MULTI_MODAL_KEYS = "multi_modal_input_keys"

Form = Literal["TRXP", "pickle", "old pickle"]


def legacy_form(data: bytes | bytearray | memoryview) -> Form | None:
    """Return which kind of legacy body ``data`` begins like, None for none."""
    start = bytes(memoryview(data).cast("B")[:16])
    if start.startswith(MAGIC):
        return "TRXP"
    if start.startswith(_PICKLE):
        return "pickle"
    return "old pickle" if start.startswith(_OLD_PICKLES) else None


def read_legacy(data: bytes | bytearray | memoryview) -> list[Experience]:
    """Return the experiences in a legacy body.

    Raises:
        DecodeError: It is not one, asks for what experiences do not need, or holds one that breaks a rule; the message
            then has its number.
    """
    experiences = []
    for result in read_legacy_each(data):
        if isinstance(result, DecodeError):
            raise result
        experiences.append(result)
    return experiences


def read_legacy_each(data: bytes | bytearray | memoryview) -> list[Experience | DecodeError]:
    """Return for each experience in a legacy body itself, or what is wrong with it.

    Raises:
        DecodeError: The body as a whole cannot be read.
    """
    form = legacy_form(data)
    view = memoryview(data).cast("B")
    budget = Budget(_FREE_BYTES + _GROWTH * len(view))
    if form == "TRXP":
        items = _trxp_items(view, budget)
    elif form == "pickle":
        items = _pickled_items(view, budget)
    elif form == "old pickle":
        raise DecodeError(
            "a pickle of protocol 0 or 1, wanted 2 to 5; load it where you trust it and write it again with "
            "pickle.dumps(..., protocol=4)"
        )
    else:
        raise DecodeError(f"the body starts with {bytes(view[:4])!r}, wanted {MAGIC!r} or a pickle: no legacy body")
    return [_experience(number, item, budget) for number, item in enumerate(items)]


def _unpickled(data: memoryview, budget: Budget) -> Any:
    """Return the value of the one pickle that ``data`` is."""
    file = io.BytesIO(data)
    value = load(file, len(data), ADMITTED, budget)
    if file.tell() != len(data):
        raise DecodeError(f"{len(data) - file.tell()} bytes follow the pickle, wanted none")
    return value


def _trxp_items(view: memoryview, budget: Budget) -> list[dict[str, Any]]:
    """Return the fields of each experience, tensors among them."""
    if len(view) < _FRAME.size:
        raise DecodeError(f"{len(view)} bytes, wanted a TRXP body of at least {_FRAME.size}")
    _, version, metadata_length, tensors_length = _FRAME.unpack_from(view)
    if version != VERSION:
        raise DecodeError(f"TRXP body of version {version}, this release reads version {VERSION}")
    wanted = _FRAME.size + metadata_length + tensors_length
    if wanted != len(view):
        raise DecodeError(
            f"TRXP body of {len(view)} bytes, wanted {wanted}: metadata of {metadata_length}, tensors of "
            f"{tensors_length}; cut short or followed by something else"
        )
    split = _FRAME.size + metadata_length
    metadata = _unpickled(view[_FRAME.size : split], budget)
    items = metadata.get("items") if type(metadata) is dict else None
    if type(items) is not list or not all(type(item) is dict and len(item) <= MAX_FIELDS for item in items):
        raise DecodeError(f'the metadata is not a map with a list "items" of maps of at most {MAX_FIELDS} fields')
    stated = metadata.get("version"), metadata.get("num_items")
    if stated != (VERSION, len(items)):
        raise DecodeError(f"metadata of version and items {short(stated)}, wanted {(VERSION, len(items))}")
    return _share_out(_tensors(view[split:]), items)


def _tensors(blob: memoryview) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_safetensors(bytes(blob))
    except Exception as error:  # hostile bytes: safetensors and torch refuse them with errors of many classes
        raise DecodeError(f"the tensors are no safetensors blob: {short(str(error))}") from error
    return tensors


def _share_out(tensors: Mapping[str, Tensor], items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``items``, each with those of ``tensors`` whose names begin with its number."""
    shares: dict[str, dict[str, Any]] = {str(number): {} for number in range(len(items))}
    for name, tensor in tensors.items():
        index, _, field = name.partition(":")
        if index not in shares:
            raise DecodeError(f"tensor {short(name)} belongs to none of {len(items)} experiences")
        group, _, key = field.partition(":")
        if group == _MULTI_MODAL:
            shares[index].setdefault(group, {})[key] = tensor
        else:
            shares[index][field] = tensor
    for item, share in zip(items, shares.values(), strict=True):
        if item.keys() & share.keys():
            raise DecodeError(f"{_some(item.keys() & share.keys())} are both metadata and tensors")
    return [item | share for item, share in zip(items, shares.values(), strict=True)]


def _pickled_items(view: memoryview, budget: Budget) -> list[dict[str, Any]]:
    """Return the fields of each experience in a bare pickle of one or of a list of them."""
    value = _unpickled(view, budget)
    records = value if type(value) is list else [value]
    return [_fields(record, EXPERIENCE, f"item {number} of the pickle") for number, record in enumerate(records)]


def _fields(value: Any, kind: RecordType, where: str) -> dict[str, Any]:
    """Return the fields of a record, or the map that ``TRXP`` has in its place."""
    if isinstance(value, Record) and value.kind is kind:
        return dict(value.fields)
    if type(value) is dict and kind is not EXPERIENCE:
        return value
    found = value.kind.name if isinstance(value, Record) else type(value).__name__
    raise DecodeError(f"{where} is of type {found}, wanted {kind.name}")


def _experience(number: int, item: dict[str, Any], budget: Budget) -> Experience | DecodeError:
    budget.charge(_EXPERIENCE_BYTES)
    try:
        return Experience(**_arguments(item, budget))
    except OverBudgetError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        return DecodeError(f"experience {number}: {error}")


def _arguments(item: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Return what the constructor takes, in plain values."""
    eid, custom, keys = (item.pop(name, None) for name in ("eid", "custom_fields", _MULTI_MODAL_KEYS))
    found = {name: plain(value, budget, str(name)) for name, value in item.items() if value is not None}
    unknown = found.keys() - set(FIELD_NAMES)
    if unknown or "tokens" not in found:
        raise DecodeError(f"unknown fields {_some(unknown)}, which would be lost" if unknown else "no tokens")
    for name in ("info", "metrics", _MULTI_MODAL):
        if not isinstance(found.get(name, {}), dict):
            raise DecodeError(f"{name} is {short(found[name])}, wanted a map")
    named = set(found.get(_MULTI_MODAL, {}))
    keys = plain(keys, budget, _MULTI_MODAL_KEYS)
    if keys is not None and set(keys) != named:
        raise DecodeError(f"multi-modal inputs {_some(keys)} are named, {_some(named)} are there")
    if eid is not None:
        found["eid"] = _eid(plain(_fields(eid, IDENTITY, "eid"), budget, "eid"))
    if custom:
        found["custom_fields"] = [
            _custom_field(plain(_fields(each, CUSTOM_FIELD, "a custom field"), budget, "a custom field"))
            for each in custom
        ]
    if "experience_type" not in found:
        found["experience_type"] = _type_of(found)
    return found


def _eid(fields: dict[str, Any]) -> EID:
    parts = {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}
    for name, wanted in (("batch", int | str), ("task", int | str), ("run", int), ("step", int), ("suffix", str)):
        if name in parts and not isinstance(parts[name], wanted):
            raise DecodeError(f"eid: {name} is {short(parts[name])}, wanted {wanted}")
    return EID(**parts)


def _custom_field(fields: dict[str, Any]) -> CustomField:
    dtype = fields.get("data_type")
    if isinstance(dtype, str):
        dtype = DTYPES_BY_TEXT.get(dtype)
    names = fields.get("source_field"), fields.get("destination_field")
    if len(fields) != 3 or not isinstance(dtype, torch.dtype) or not all(isinstance(name, str) for name in names):
        raise DecodeError(f"a custom field is {short(fields)}, wanted source_field, destination_field and data_type")
    return CustomField(**fields | {"data_type": dtype})


def _type_of(found: Mapping[str, Any]) -> str | None:
    """Return the type that fits the action mask, None to leave it to the constructor; see the top of this file."""
    tokens, mask, logprobs = (found.get(name) for name in ("tokens", "action_mask", "logprobs"))
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.dim() != 1 or tokens.dim() != 1:
        return None
    if found.get("chosen") is not None and found.get("rejected") is not None:
        return MULTI_TURN
    if found.get("truncate_status") == PROMPT_TRUNCATED:
        filled = isinstance(logprobs, Tensor) and mask.shape == logprobs.shape and not bool(mask.any())
    else:
        filled = len(mask) == len(tokens) - whole("prompt_length", found.get("prompt_length", 1)) and bool(mask.all())
    return SINGLE_TURN if filled else MULTI_TURN


def _some(names: Iterable[Any]) -> str:
    """Return the first of ``names`` for an error message."""
    shown = sorted(map(short, names))
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "") if shown else "none"
