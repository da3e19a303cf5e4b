"""Converts experiences to Hugging Face datasets and back.

A row has plain columns for filtering and editing (ids, reward, texts, token lists) and the whole experience as one
encoded body. The body preserves values that Arrow cannot hold exactly (dtypes, types, custom fields, info of mixed
shapes). A plain column takes precedence over the body, so edits are applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.fields import TENSOR_FIELDS
from trinity_mq.experience.record import FIELD_NAMES, Experience

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
    kinds[ENCODED] = datasets.Value("large_binary")  # binary is limited to 2 GiB per column
    records = [to_record(experience) for experience in experiences]
    columns = {name: [record[name] for record in records] for name in kinds}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def from_hf_datasets(dataset: Dataset | IterableDataset | Iterable[Mapping[str, Any]]) -> list[Experience]:
    """Return the experiences of a dataset made by :func:`to_hf_datasets`, with edits of its plain columns applied.

    Raises:
        ValueError: The column with the encoded experience is missing.
        DecodeError: An encoded experience is damaged.
        ExperienceError: An edit breaks a rule.
    """
    # A dataset formatted for torch, numpy or pandas would return their types, and NaN or "" instead of None.
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return [from_record(row) for row in plain]


def to_record(experience: Experience) -> dict[str, Any]:
    """Return one row of plain values."""
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
    record[ENCODED] = experience.serialize()
    return record


def from_record(record: Mapping[str, Any]) -> Experience:
    """Return the experience of one row; removed columns are taken from the encoded body."""
    if not isinstance(record.get(ENCODED), bytes):
        raise ValueError(
            f"a row has no bytes in column {ENCODED!r} (columns: {', '.join(record)}), wanted a dataset made by "
            "to_hf_datasets"
        )
    base = Experience.deserialize(record[ENCODED])
    values: dict[str, Any] = {name: getattr(base, name) for name in FIELD_NAMES}
    values |= {name: record[name] for name in _PLAIN if name in record}
    values |= {name: _tensor(name, record[name], values[name]) for name in _TENSORS if name in record}
    values["eid"] = _edited(base.eid, record)
    return Experience(**values)


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
