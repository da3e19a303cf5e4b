"""Experiences to columns: what :func:`trinity_mq.experience.codec.encode` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.columns import (
    INT64,
    Column,
    pack_documents,
    pack_floats,
    pack_ints,
    pack_lengths,
    pack_texts,
)
from trinity_mq.experience.documents import DocumentWriter
from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import EncodeError
from trinity_mq.experience.experience import CustomField, Experience
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, number, sampling_temperature, short, whole
from trinity_mq.experience.layout import (
    CUSTOM_FIELDS,
    DOCUMENT_COLUMNS,
    DOCUMENT_TENSORS,
    EID_IDS,
    EID_INTS,
    EID_PREFIX,
    MULTI_MODAL,
    TEXT_COLUMNS,
    VERSIONS,
)
from trinity_mq.experience.rules import DPO, TRUNCATE_STATUSES, TYPES, Lengths, check_batch, check_versions
from trinity_mq.experience.tail import TailWriter

Rows = list[dict[str, Any]]


def disassemble(experiences: Sequence[Experience]) -> tuple[dict[str, Any], list[Any]]:
    """Return the head of a body, ready for msgpack, and the pieces of its tail.

    Raises:
        EncodeError: A field breaks a rule or does not fit the format.
    """
    wrong = next((item for item in experiences if not isinstance(item, Experience)), None)
    if wrong is not None:
        raise EncodeError(f"got {short(wrong)}, wanted Experience objects")
    rows: Rows = [experience.__dict__ for experience in experiences]
    tail, documents = TailWriter(), DocumentWriter()
    columns: dict[str, Column] = {}
    if rows:
        try:
            lengths = _tensor_columns(rows, tail)
            columns = _scalar_columns(rows, lengths)
        except ExperienceError as error:
            raise EncodeError(str(error)) from error
        columns |= _eid_columns([row["eid"] for row in rows])
        columns |= _document_columns(rows, documents)
        _multi_modal_columns(rows, tail)
        if documents.tensors:
            tail.add(DOCUMENT_TENSORS, documents.tensors)
    return {"n": len(rows), "columns": columns, "tensors": tail.entries}, tail.buffers()


def _tensor_columns(rows: Rows, tail: TailWriter) -> dict[str, Lengths]:
    """Add the tensor fields to the tail; return the lengths of those that any experience has."""
    lengths: dict[str, Lengths] = {}
    for name, (normalise, dtypes, dims) in TENSOR_FIELDS.items():
        column: list[Tensor | None] = [row[name] for row in rows]
        sizes = []
        for number_, tensor in enumerate(column):
            if tensor is None:
                sizes.append(-1)
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.dim() != dims:
                column[number_] = kept = normalise(f"experience {number_}: {name}", tensor)
                sizes.append(kept.shape[0])
            else:
                sizes.append(tensor.shape[0])
        if max(sizes) >= 0:
            lengths[name] = np.array(sizes, dtype=np.int64)
            tail.add(name, column)
    if "tokens" not in lengths or (lengths["tokens"] < 0).any():
        raise ExperienceError("tokens is None in an experience, wanted token ids")
    return lengths


def _scalar_columns(rows: Rows, lengths: dict[str, Lengths]) -> dict[str, Column]:
    """Return the columns of texts and numbers, after the checks that need them."""
    kinds = [row["experience_type"] for row in rows]
    statuses = [row["truncate_status"] for row in rows]
    if not set(kinds) <= set(TYPES) or not set(statuses) <= set(TRUNCATE_STATUSES):
        raise ExperienceError(
            f"experience_type {set(kinds)} and truncate_status {set(statuses)}, wanted only {TYPES} and "
            f"{TRUNCATE_STATUSES}"
        )
    prompts = [whole("prompt_length", row["prompt_length"]) for row in rows]
    check_batch(kinds, statuses, prompts, lengths)
    indexes = [_int("index", row["index"]) for row in rows]
    rewards = [v if v is None or type(v) is float else number("reward", v) for v in (row["reward"] for row in rows)]
    heats = [row["temperature"] for row in rows]
    heats = [None if heat is None else sampling_temperature("temperature", heat) for heat in heats]
    columns = {"prompt_length": pack_ints(prompts, "prompt_length")}
    for name in TEXT_COLUMNS:
        _put(columns, name, [row[name] for row in rows], pack_texts)
    _put(columns, "index", indexes, pack_ints)
    _put(columns, "reward", rewards, pack_floats)
    _put(columns, "temperature", heats, pack_floats)
    masked = lengths["action_mask"].tolist() if "action_mask" in lengths else [-1] * len(rows)
    versions = [_versions(row, size) for row, size in zip(rows, masked, strict=True)]
    _put(columns, VERSIONS, versions, _pack_versions)
    return columns


def _put(columns: dict[str, Column], name: str, values: list[Any], pack: Any) -> None:
    if values.count(None) != len(values):
        columns[name] = pack(values, name)


def _int(name: str, value: Any) -> Any:
    return value if value is None or type(value) is int else whole(name, value)


def _versions(row: dict[str, Any], masked: int) -> Any:
    """Return the checked versions of a row; ``masked`` is the length of its action mask, -1 for none."""
    return check_versions(row[VERSIONS], None if row["experience_type"] == DPO else masked)


def _pack_versions(values: list[Any], name: str) -> Column:
    counts = [-1 if rows is None else len(rows) for rows in values]
    flat = [part for rows in values if rows is not None for row in rows for part in row]
    try:
        return {"i": np.array(flat, dtype=INT64).tobytes(), "l": pack_lengths(counts)}
    except OverflowError as error:
        raise EncodeError(f"{name} holds a number that does not fit 64 bits: {error}") from error


def _eid_columns(eids: list[Any]) -> dict[str, Column]:
    wrong = next((eid for eid in eids if not isinstance(eid, EID)), None)
    if wrong is not None:
        raise EncodeError(f"eid is {short(wrong)}, wanted an EID")
    columns: dict[str, Column] = {}
    for name in EID_IDS:
        columns[EID_PREFIX + name] = _pack_ids([getattr(eid, name) for eid in eids], f"eid.{name}")
    try:
        for name in EID_INTS:
            values = [_int(f"eid.{name}", getattr(eid, name)) for eid in eids]
            columns[EID_PREFIX + name] = pack_ints(values, f"eid.{name}")
    except ExperienceError as error:
        raise EncodeError(str(error)) from error
    suffixes = [eid.suffix for eid in eids]
    if None in suffixes:
        raise EncodeError("eid.suffix is None, wanted text")
    columns[EID_PREFIX + "suffix"] = pack_texts(suffixes, "eid.suffix")
    return columns


def _pack_ids(values: list[Any], name: str) -> Column:
    """Return a column of ids that are each a whole number or a text."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return pack_ints(values, name)
    if kinds == {str}:
        return pack_texts(values, name)
    mixed = [value if isinstance(value, str) else _id(name, value) for value in values]
    return pack_documents(mixed, name, DocumentWriter())


def _id(name: str, value: Any) -> int:
    try:
        return whole(name, value)
    except ExperienceError as error:
        raise EncodeError(f"{error} or text") from error


def _document_columns(rows: Rows, writer: DocumentWriter) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, kind in DOCUMENT_COLUMNS.items():
        wrong = next((row[name] for row in rows if row[name] is not None and not isinstance(row[name], kind)), None)
        if wrong is not None:
            raise EncodeError(f"{name} is {short(wrong)}, wanted a {kind.__name__}")
        # An empty info or metrics is the default and costs nothing; an empty list of messages is not no list.
        values = [None if row[name] is None or row[name] == {} else row[name] for row in rows]
        if values.count(None) != len(values):
            columns[name] = pack_documents(values, name, writer)
    customs = [[_custom(item) for item in row[CUSTOM_FIELDS]] or None for row in rows]
    if any(customs):
        columns[CUSTOM_FIELDS] = pack_documents(customs, CUSTOM_FIELDS, writer)
    return columns


def _custom(item: Any) -> list[str]:
    if not isinstance(item, CustomField) or not isinstance(item.data_type, torch.dtype):
        raise EncodeError(f"custom_fields holds {short(item)}, wanted CustomField with a torch.dtype")
    return [item.source_field, item.destination_field, str(item.data_type).removeprefix("torch.")]


def _multi_modal_columns(rows: Rows, tail: TailWriter) -> None:
    inputs = [row[MULTI_MODAL] for row in rows]
    if inputs.count(None) == len(inputs):
        return
    for number_, item in enumerate(inputs):
        if item is not None and not all(type(key) is str and isinstance(t, Tensor) for key, t in item.items()):
            raise EncodeError(f"experience {number_}: {MULTI_MODAL} is {short(item)}, wanted tensors by name")
    for key in dict.fromkeys(key for item in inputs if item is not None for key in item):
        tail.add(MULTI_MODAL, [None if item is None else item.get(key) for item in inputs], key)
