"""Converts experiences to Hugging Face datasets and back.

A row has plain columns for filtering and editing (ids, reward, texts, token lists), JSON columns (``info``,
``metrics``, messages) and the whole experience as one encoded body. The body preserves values that the columns cannot
hold exactly (dtypes, types, custom fields, tensors in ``info``). A column takes precedence over the body, so edits are
applied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, short_repr
from trinity_mq.experience.record import FIELD_NAMES, Experience
from trinity_mq.experience.rules import stored_type

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

ENCODED = "experience"
"""Name of the column with the encoded body."""

_IDS = {"batch": "string", "task": "string", "run": "int64", "step": "int64"}
_PLAIN = {
    "experience_type": "string",
    "prompt_length": "int64",
    "reward": "float64",
    "temperature": "float64",
    "truncate_status": "string",
    "prompt_text": "string",
    "response_text": "string",
    "taskset": "string",
    "index": "int64",
}
_TENSORS = {
    "tokens": "int32",
    "logprobs": "float32",  # float32 holds bfloat16 and float16 exactly
    "action_mask": "bool",
    "token_level_reward": "float32",
    "advantages": "float32",
    "returns": "float32",
    "teacher_logprobs": "float32",
    "chosen": "int32",
    "rejected": "int32",
}
JSON_COLUMNS = ("info", "metrics", "messages", "tools", "chosen_messages", "rejected_messages")
"""Columns with JSON values. Tensors and arrays are shown as lists, numbers without a JSON form as None or text, bytes
as their number, and other objects as text."""
SAME = 1e-9
"""Maximum relative and absolute difference of numbers in JSON columns that does not count as an edit: ``datasets``
rounds them when it maps a dataset.
"""


def to_hf_datasets(experiences: Sequence[Experience]) -> Dataset:
    """Return a dataset with one row per experience; :func:`from_hf_datasets` restores equal experiences.

    The columns and their types are always the same, even if values are None, so that such datasets can be concatenated.

    Raises:
        ImportError: ``datasets`` is not installed.
        EncodeError: An experience does not fit the wire format.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "to_hf_datasets needs the package datasets, which is not installed: pip install 'trinity-mq[datasets]'"
        ) from error
    kinds = {name: datasets.Value(kind) for name, kind in (_IDS | _PLAIN).items()}
    kinds |= {name: datasets.List(datasets.Value(kind)) for name, kind in _TENSORS.items()}
    kinds |= {name: datasets.Json() for name in JSON_COLUMNS}
    kinds[ENCODED] = datasets.Value("large_binary")  # binary is limited to 2 GiB per column
    records = [with_json_texts(to_record(experience)) for experience in experiences]
    columns = {name: [record[name] for record in records] for name in kinds}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def from_hf_datasets(dataset: Dataset | IterableDataset | Iterable[Mapping[str, Any]]) -> list[Experience]:
    """Return the experiences of a dataset made by :func:`to_hf_datasets`, with edits of its columns applied.

    A dataset made by Trinity-RFT's ``to_hf_datasets`` is accepted too; its columns are the fields of an experience.

    Raises:
        ValueError: The column with the encoded experience is missing, and so are the columns of Trinity-RFT.
        DecodeError: An encoded experience is damaged.
        ExperienceError: An edit breaks a rule.
    """
    # A dataset formatted for torch, numpy or pandas would return their types, and NaN or "" instead of None.
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return [from_record(row) for row in plain]


def to_record(experience: Experience) -> dict[str, Any]:
    """Return an experience as a row of plain values."""
    encoded = experience.serialize()
    record: dict[str, Any] = {
        "batch": str(experience.eid.batch),
        "task": str(experience.eid.task),
        "run": experience.eid.run,
        "step": experience.eid.step,
    }
    record |= {name: getattr(experience, name) for name in _PLAIN}
    for name in _TENSORS:
        tensor: Tensor | None = getattr(experience, name)
        record[name] = None if tensor is None else tensor.tolist()
    record |= {name: _readable(getattr(experience, name)) for name in JSON_COLUMNS}
    record[ENCODED] = encoded
    return record


def with_json_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its JSON columns as text."""
    return {
        name: json.dumps(value) if name in JSON_COLUMNS and value is not None else value
        for name, value in record.items()
    }


def from_record(record: Mapping[str, Any]) -> Experience:
    """Return the experience of one row; removed columns are taken from the encoded body."""
    if not isinstance(record.get(ENCODED), bytes):
        if isinstance(record.get("eid"), Mapping) and "tokens" in record:
            return _from_trinity(record)
        raise ValueError(
            f"a row has no bytes in column {ENCODED!r} (columns: {', '.join(record)}), wanted a dataset made by "
            "to_hf_datasets"
        )
    base = Experience.deserialize(record[ENCODED])
    values: dict[str, Any] = {name: getattr(base, name) for name in FIELD_NAMES}
    values |= {name: record[name] for name in _PLAIN if name in record}
    values |= {name: _tensor(name, record[name], values[name]) for name in _TENSORS if name in record}
    values |= {name: _json_value(name, record[name], values[name]) for name in JSON_COLUMNS if name in record}
    values["eid"] = _edited(base.eid, record)
    return Experience(**values)


def _from_trinity(record: Mapping[str, Any]) -> Experience:
    """Return the experience of a row whose columns are the fields of Trinity-RFT's class.

    Arrow adds the keys of all rows to each map, with None as value; such keys are left out.
    """
    fields = {name: value for name, value in record.items() if name in FIELD_NAMES and value is not None}
    for name in JSON_COLUMNS:
        if name in fields:
            fields[name] = _without_none(fields[name])
    fields["multi_modal_inputs"] = _without_none(fields.get("multi_modal_inputs"))
    fields |= {name: TENSOR_FIELDS[name][0](name, fields[name]) for name in TENSOR_FIELDS if name in fields}
    fields.setdefault("experience_type", stored_type(fields))
    return Experience(**fields)


def _without_none(value: Any) -> Any:
    """Return ``value`` without map entries that are None, except the content of messages."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None or key == "content"}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _readable(value: Any) -> Any:
    """Return a JSON form of ``value``."""
    match value:
        case Tensor() | np.ndarray() | np.generic():
            return _readable(value.tolist())
        case Mapping():
            return {str(key): _readable(item) for key, item in value.items()}
        case list() | tuple():
            return [_readable(item) for item in value]
        case bool() | str() | None:
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else str(value)
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return f"<{len(value)} bytes>"
    return str(value)


def _json_value(name: str, value: Any, encoded: Any) -> Any:
    """Return ``value`` if it differs from the JSON form of ``encoded``, else ``encoded``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ExperienceError(f"{name} is {short_repr(value)}, wanted JSON") from error
    return encoded if _same(value, json.loads(json.dumps(_readable(encoded)))) else value


def _same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal; numbers may differ by :data:`SAME`."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float | int):
        return math.isclose(left, right, rel_tol=SAME, abs_tol=SAME)
    return type(left) is type(right) and bool(left == right)


def _tensor(name: str, value: Sequence[Any] | None, encoded: Tensor | None) -> Tensor | None:
    """Return ``value`` in the stored form of the field ``name``, floats in the dtype of the encoded body."""
    if value is None:
        return None
    tensor = TENSOR_FIELDS[name][0](name, value)
    return tensor if encoded is None else tensor.to(encoded.dtype)


def _edited(eid: EID, record: Mapping[str, Any]) -> EID:
    """Return ``eid`` with the edits of the row; unchanged batch and task keep their type, such as whole numbers."""
    batch, task = record.get("batch", str(eid.batch)), record.get("task", str(eid.task))
    return EID(
        batch=eid.batch if batch == str(eid.batch) else batch,
        task=eid.task if task == str(eid.task) else task,
        run=record.get("run", eid.run),
        step=record.get("step", eid.step),
        suffix=eid.suffix,
    )
