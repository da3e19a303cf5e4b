"""Experiences to Hugging Face datasets and back.

A row shows what a dataset is filtered and edited by (ids, reward, texts, token lists) as plain columns and carries the
whole experience as one encoded body beside them, so that what Arrow cannot hold exactly (dtypes, types, custom fields,
info of mixed shapes) survives. A plain column wins over the body: edits count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.experience import FIELD_NAMES, Experience

if TYPE_CHECKING:
    from datasets import Dataset

ENCODED = "experience"
"""The column with the encoded body."""

_PLAIN = (
    "experience_type",
    "prompt_length",
    "reward",
    "temperature",
    "truncate_status",
    "prompt_text",
    "response_text",
    "taskset",
    "index",
)
_TENSORS = (
    "tokens",
    "logprobs",
    "action_mask",
    "token_level_reward",
    "advantages",
    "returns",
    "teacher_logprobs",
    "chosen",
    "rejected",
)


def to_hf_datasets(experiences: list[Experience]) -> Dataset:
    """Return a dataset with one row per experience; :func:`from_hf_datasets` gives back equal ones.

    Raises:
        ImportError: ``datasets`` is not installed.
        EncodeError: An experience does not fit the wire format.
    """
    return _datasets().Dataset.from_list([to_record(experience) for experience in experiences])


def from_hf_datasets(dataset: Dataset) -> list[Experience]:
    """Return the experiences of a dataset made by :func:`to_hf_datasets`, with what was edited in its plain columns.

    Raises:
        ValueError: The column with the encoded experience is missing.
        DecodeError: It is damaged.
        ExperienceError: An edit breaks a rule.
    """
    rows: Iterable[Mapping[str, Any]] = dataset
    return [from_record(row) for row in rows]


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
    """Return the experience of one row; columns that are gone are taken from the encoded body."""
    if not isinstance(record.get(ENCODED), bytes):
        raise ValueError(
            f"a row has no bytes in column {ENCODED!r} (columns: {', '.join(record)}), wanted a dataset made by "
            "to_hf_datasets"
        )
    base = Experience.deserialize(record[ENCODED])
    values: dict[str, Any] = {name: getattr(base, name) for name in FIELD_NAMES}
    values |= {name: record[name] for name in _PLAIN if name in record}
    for name in _TENSORS:
        if name in record:
            values[name] = _like(values[name], record[name])
    values["eid"] = _edited(base.eid, record)
    return Experience(**values)


def _like(known: Tensor | None, value: Sequence[Any] | None) -> Any:
    """Return ``value`` in the dtype the encoded body had it in."""
    return value if value is None or known is None else torch.tensor(value, dtype=known.dtype)


def _edited(eid: EID, record: Mapping[str, Any]) -> EID:
    """Return ``eid`` with what the row says otherwise; whole numbers in batch and task stay whole numbers."""
    batch, task = record.get("batch", str(eid.batch)), record.get("task", str(eid.task))
    return EID(
        batch=eid.batch if batch == str(eid.batch) else batch,
        task=eid.task if task == str(eid.task) else task,
        run=record.get("run", eid.run),
        step=record.get("step", eid.step),
        suffix=eid.suffix,
    )


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "to_hf_datasets needs the package datasets, which is not installed: pip install 'trinity-mq[datasets]'"
        ) from error
    return datasets
