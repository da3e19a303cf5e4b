"""Converts legacy bodies to experience bodies. reader.py runs this file; each body is read in a fork with limits.

``TRXP``, little-endian: magic (4), version 1 (u8), lengths of metadata and tensors (u64 each); then the metadata, a
pickle of ``{"version": 1, "num_items": n, "items": [...]}``, then a safetensors blob with entries ``index:field`` and
``index:multi_modal_inputs:key``.

``TRXP`` does not state the type of an experience; :func:`~trinity_mq.experience.rules.stored_type` finds it. Bare
pickles state it.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from trinity_mq.experience.batch import decode, encode
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short_repr
from trinity_mq.experience.legacy.reader import MAGIC, max_unfolded_bytes
from trinity_mq.experience.legacy.unpickle import (
    DTYPES_BY_TEXT,
    PickledCustomField,
    PickledEID,
    PickledExperience,
    load,
)
from trinity_mq.experience.record import FIELD_NAMES, CustomField, Experience
from trinity_mq.experience.rules import stored_type
from trinity_mq.runtime.processes.children import ChildEndedError, answer_in_fork, serve

VERSION = 1
MAX_FIELDS = 64
"""Maximum number of an experience's fields, about twice the number that any experience has."""
CPU_SECONDS = 2
BYTES_PER_CPU_SECOND = 1 << 20
"""Processor time limit for a body: ``CPU_SECONDS``, and one more second per this many bytes."""

_FRAME = struct.Struct("<4sBQQ")
_MULTI_MODAL = "multi_modal_inputs"
_MULTI_MODAL_KEYS = "multi_modal_input_keys"


def answer(body: bytes) -> bytes:
    """Return the answer of :func:`read` for ``body``, computed in a fork with limits. If the fork ends without an
    answer, for example at a limit, the answer is an error.
    """
    seconds = CPU_SECONDS + len(body) // BYTES_PER_CPU_SECOND
    try:
        return answer_in_fork(read, body, seconds, max_unfolded_bytes(len(body)))
    except ChildEndedError as error:
        reason = f"reading the body ends the reading process (exit code {error.exitcode})"
        if error.exitcode in {-signal.SIGXCPU, -signal.SIGKILL}:
            reason = f"reading the body takes more than {seconds} s of processor time"
        return _packed({"error": reason})


def read(body: bytes) -> bytes:
    """Return ``{"items": [...]}`` as msgpack, with an experience body or an error text for each experience; or
    ``{"error": text}`` for a body that cannot be read.
    """
    view, limit = memoryview(body), max_unfolded_bytes(len(body))
    try:
        items = _trxp_items(view) if body.startswith(MAGIC) else _pickled_items(view)
        answers = [_answer(number, item) for number, item in enumerate(items)]
    except DecodeError as error:
        return _packed({"error": str(error)})
    except MemoryError:
        return _packed({"error": f"the body expands to more than {limit} bytes, far more than its own size"})
    return _packed({"items": answers})


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="replace")
    return packed


def _answer(number: int, item: dict[str, Any]) -> bytes | str:
    try:
        body = encode([Experience(**_arguments(item))])
        decode(body)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        return f"experience {number}: {str(error).removeprefix('experience 0: ')}"
    return body


def _trxp_items(view: memoryview) -> list[dict[str, Any]]:
    """Return the fields of each experience, including tensors."""
    if len(view) < _FRAME.size:
        raise DecodeError(f"{len(view)} bytes, wanted a TRXP body of at least {_FRAME.size}")
    _, version, metadata_length, tensors_length = _FRAME.unpack_from(view)
    if version != VERSION:
        raise DecodeError(f"TRXP body of version {version}, this release reads version {VERSION}")
    expected = _FRAME.size + metadata_length + tensors_length
    if expected != len(view):
        raise DecodeError(
            f"TRXP body of {len(view)} bytes, wanted {expected}: metadata of {metadata_length}, tensors of "
            f"{tensors_length}; cut short or followed by something else"
        )
    split = _FRAME.size + metadata_length
    metadata = load(view[_FRAME.size : split])
    items = metadata.get("items") if type(metadata) is dict else None
    if type(items) is not list or not all(type(item) is dict and len(item) <= MAX_FIELDS for item in items):
        raise DecodeError(f'the metadata is not a map with a list "items" of maps of at most {MAX_FIELDS} fields')
    stated = metadata.get("version"), metadata.get("num_items")
    if stated != (VERSION, len(items)):
        raise DecodeError(f"metadata of version and items {short_repr(stated)}, wanted {(VERSION, len(items))}")
    try:
        tensors: dict[str, Tensor] = load_safetensors(bytes(view[split:]))
    except Exception as error:  # hostile bytes: safetensors and torch raise errors of many classes
        raise DecodeError(f"the tensors are not a safetensors blob: {short_repr(str(error))}") from error
    return _with_tensors(items, tensors)


def _with_tensors(items: Sequence[dict[str, Any]], tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return ``items``, each with the ``tensors`` whose names begin with its number."""
    tensors_by_index: dict[str, dict[str, Any]] = {str(number): {} for number in range(len(items))}
    for name, tensor in tensors.items():
        index, _, field = name.partition(":")
        if index not in tensors_by_index:
            raise DecodeError(f"tensor {short_repr(name)} belongs to none of {len(items)} experiences")
        group, _, key = field.partition(":")
        if group == _MULTI_MODAL:
            tensors_by_index[index].setdefault(group, {})[key] = tensor
        else:
            tensors_by_index[index][field] = tensor
    for item, item_tensors in zip(items, tensors_by_index.values(), strict=True):
        if item.keys() & item_tensors.keys():
            raise DecodeError(f"{_first_names(item.keys() & item_tensors.keys())} are both metadata and tensors")
    return [item | item_tensors for item, item_tensors in zip(items, tensors_by_index.values(), strict=True)]


def _pickled_items(view: memoryview) -> list[dict[str, Any]]:
    """Return the fields of each experience in a bare pickle of one experience or of a list."""
    value = load(view)
    records = value if type(value) is list else [value]
    return [_fields(record, PickledExperience, f"item {number} of the pickle") for number, record in enumerate(records)]


def _fields(value: Any, kind: type, name: str) -> dict[str, Any]:
    """Return the fields of a record of type ``kind``, or the map that ``TRXP`` holds instead of a record."""
    if type(value) is kind and len(vars(value)) <= MAX_FIELDS:
        return dict(vars(value))
    if type(value) is dict and kind is not PickledExperience:
        return value
    raise DecodeError(
        f"{name} is of type {type(value).__name__.removeprefix('Pickled')}, wanted {kind.__name__[len('Pickled') :]} "
        f"of at most {MAX_FIELDS} fields"
    )


def _arguments(item: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the constructor."""
    eid, custom, keys = (item.pop(name, None) for name in ("eid", "custom_fields", _MULTI_MODAL_KEYS))
    arguments = {name: value for name, value in item.items() if value is not None}
    unknown = arguments.keys() - set(FIELD_NAMES)
    if unknown or "tokens" not in arguments:
        raise DecodeError(f"unknown fields {_first_names(unknown)}, which would be lost" if unknown else "no tokens")
    for name in ("info", "metrics", _MULTI_MODAL):
        if not isinstance(arguments.get(name, {}), dict):
            raise DecodeError(f"{name} is {short_repr(arguments[name])}, wanted a map")
    named = set(arguments.get(_MULTI_MODAL, {}))
    if keys is not None and set(keys) != named:
        raise DecodeError(f"multi-modal inputs {_first_names(keys)} are named, {_first_names(named)} are there")
    if eid is not None:
        arguments["eid"] = _fields(eid, PickledEID, "eid")
    if custom:
        arguments["custom_fields"] = [_custom_field(custom_field) for custom_field in custom]
    if "experience_type" not in arguments:
        arguments["experience_type"] = stored_type(arguments)
    return arguments


def _custom_field(value: Any) -> CustomField:
    fields = _fields(value, PickledCustomField, "a custom field")
    dtype = fields.get("data_type")
    if isinstance(dtype, str):
        dtype = DTYPES_BY_TEXT.get(dtype)
    names = fields.get("source_field"), fields.get("destination_field")
    if len(fields) != 3 or not isinstance(dtype, torch.dtype) or not all(isinstance(name, str) for name in names):
        raise DecodeError(
            f"a custom field is {short_repr(fields)}, wanted source_field, destination_field and data_type"
        )
    return CustomField(**fields | {"data_type": dtype})


def _first_names(names: Iterable[Any]) -> str:
    """Return the first of ``names`` for an error message."""
    shown = sorted(map(short_repr, names))
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "") if shown else "none"


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
