"""Train batches from existing records: supervised data, or rollouts recorded earlier."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from trinity_agents.trainer.sources.base import TrainBatch
from trinity_mq.config import Config, ExperienceBufferConfig
from trinity_mq.config.switches import SwitchError
from trinity_mq.data.epochs import EpochOrder
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.formatters import FormatError, Reader, find_formatter, fit_to_length
from trinity_mq.data.records import Record, check_records_unchanged, read_records
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.experience import DecodeError, Experience, ExperienceBatch
from trinity_mq.experience.eid import EID
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

TRIED = 64
"""Maximum number of records tried before the training begins; if none of them is usable, the settings are wrong."""
NAMED = 20
"""Maximum number of records that the log names because they cannot be converted."""
BODY_SUFFIX = ".tmqx"
"""Suffix of files with recorded experiences."""

Rows = Callable[[Sequence[int]], tuple[list[Experience], dict[str, float]]]
"""Converts the records with these indexes; returns the experiences, and metrics with the number of unusable records."""


@dataclass(frozen=True, slots=True)
class Records:
    """Records to train on, and their conversion to experiences."""

    count: int
    """Number of records, at least 1."""
    identity: str
    """Hash over the records."""
    rows: Rows
    """Converts records to experiences; called on a thread."""
    source: Sequence[Record] = ()
    """The records themselves; empty for recorded experiences."""


class RecordSource:
    """Batches of records, epoch after epoch.

    The state is the position: a trainer that is killed at any point resumes with the next records, each once per epoch.

    Args:
        data: Settings of the records and their order.
        records: The records.
        seed: Seed of the order.
        size: Number of records in a batch.
        batches: Number of batches; None: as many as ``epochs`` needs.
        epochs: Number of passes over the records, if ``batches`` is None; the last batch has the remaining records.
    """

    def __init__(
        self,
        data: ExperienceBufferConfig,
        records: Records,
        *,
        seed: int,
        size: int,
        batches: int | None,
        epochs: int = 1,
    ) -> None:
        self._data, self._records, self._size = data, records, size
        self._settings = {"identity": records.identity, "seed": seed, "selector": data.selector}
        self._order = EpochOrder(records.count, data.selector, seed)
        self._max_records = epochs * records.count
        self._total = batches if batches is not None else math.ceil(self._max_records / self._size)
        self._has_epochs = batches is None
        self._batch = 0
        """Number of consumed batches."""
        self._next: tuple[TrainBatch, tuple[int, int]] | None = None
        """The current batch and the (epoch, cursor) position after it, None after it was consumed."""
        self.changed = Notifier()
        self.has_company = False
        self.bytes_since_save = 0

    @property
    def ended(self) -> int:
        """Number of batches of the run."""
        return self._total

    @property
    def waiting(self) -> list[str]:
        """Always empty: records have no tickets that wait."""
        return []

    @property
    def unused(self) -> list[int]:
        """Always empty: batches of records are not repaired."""
        return []

    def available(self) -> bool:
        """Return whether a further batch exists."""
        return self._batch < self._total

    async def next(self) -> TrainBatch:
        """Return the next batch; the last batch of the last epoch has the remaining records."""
        if self._next is None:
            size = min(self._size, self._max_records - self._order.given) if self._has_epochs else self._size
            before = (self._order.epoch, self._order.cursor)
            indexes = self._order.take(size)
            behind = (self._order.epoch, self._order.cursor)
            self._order.move_to(*before)
            experiences, metrics = await asyncio.to_thread(self._records.rows, indexes)
            number = self._batch + 1
            for place, experience in enumerate(experiences):
                experience.eid = EID(
                    number, place if experience.index is None else experience.index, run=place, suffix="record"
                )
            batch = TrainBatch(
                number,
                f"records-{number}",
                "records",
                "ready" if experiences else "empty",
                ExperienceBatch.of(experiences),
                metrics=metrics,
                announced=len(experiences),
            )
            self._next = batch, behind
        return self._next[0]

    def consumed(self) -> None:
        """Advance past the batch that :meth:`next` returned last."""
        assert self._next is not None
        self._order.move_to(*self._next[1])
        self._batch, self._next = self._batch + 1, None

    def state(self) -> dict[str, Any]:
        """Return the position, and the identity and order of the records to which it applies."""
        return {**self._settings, "batch": self._batch, "epoch": self._order.epoch, "cursor": self._order.cursor}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position.

        Raises:
            FatalError: The position belongs to other records, or to another order.
        """
        what = f"training data {self._data.name!r}"
        check_records_unchanged(what, self._data, state.get("identity"), self._records.source, self._records.identity)
        for key, now in self._settings.items():
            if state.get(key) != now:
                raise FatalError(
                    f"{what}: the checkpoint's position belongs to {key} {state.get(key)!r}, and here is {now!r}; put "
                    "the old data and settings back, or start over with --fresh"
                )
        try:
            self._order.move_to(state.get("epoch"), state.get("cursor"))
        except ValueError as error:
            raise FatalError(f"{what}: {error}") from error
        self._batch, self._next = int(state["batch"]), None

    def run_begins(self, offset: int) -> None:
        """Do nothing: records are not on a stream."""

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.get_running_loop().create_future()


def open_records(config: Config, codec: TextCodec) -> RecordSource:
    """Return the source of a run of mode ``train``, at the first record.

    Raises:
        TasksetError: The data cannot be read, or no record can be used.
    """
    data, buffer = config.buffer.trainer_input.experience_buffer, config.buffer
    return RecordSource(
        data,
        read(data, codec, config.model.max_model_len),
        seed=config.seed,
        size=buffer.batch_size,
        batches=buffer.total_steps,
        epochs=buffer.total_epochs,
    )


def read(data: ExperienceBufferConfig, codec: TextCodec, max_tokens: int) -> Records:
    """Return the records that ``data`` describes.

    Args:
        data: Path and format of the records.
        codec: The model's tokenizer and chat template.
        max_tokens: Maximum number of tokens of prompt and answer together.

    Raises:
        TasksetError: The records cannot be read, no record can be used, or the chat template cannot follow ``format``.
    """
    if data.schema_type == "experience":
        batch, identity = recorded(data)
        return Records(len(batch), identity, lambda indexes: (batch.select(indexes).to_shared_list(), {}))
    rows, identity = read_records(data)
    try:
        make = _Formatted(data, rows, codec, max_tokens)
    except SwitchError as error:
        raise TasksetError(f"training data {data.name!r}: format: {error}") from error
    make.try_first()
    return Records(len(rows), identity, make, rows)


def recorded(data: ExperienceBufferConfig) -> tuple[ExperienceBatch, str]:
    """Return the experiences of a ``.tmqx`` file, or of all such files below a folder in name order, at most
    ``data.limit``; and an identity of their number and the hash of the files.

    Raises:
        TasksetError: A file cannot be read, or no experience is found.
    """
    path = Path(data.path).expanduser()
    files = sorted(path.rglob(f"*{BODY_SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise TasksetError(f"training data {data.name!r}: the folder {path} holds no {BODY_SUFFIX} file")
    digest, batches = hashlib.sha256(), []
    for file in files:
        try:
            body = file.read_bytes()
            batches.append(ExperienceBatch.decode(body))
        except OSError as error:
            raise TasksetError(
                f"training data {data.name!r}: {file} cannot be read: {error.strerror or error}"
            ) from error
        except DecodeError as error:
            raise TasksetError(
                f"training data {data.name!r}: {file} holds no experiences: {error}. Files of Trinity-RFT are turned "
                "into such files by `trinity-mq convert-experiences`"
            ) from error
        digest.update(body)
    whole = ExperienceBatch.concat(batches)
    if data.limit is not None:
        whole = whole.select(range(min(data.limit, len(whole))))
    if not len(whole):
        raise TasksetError(f"training data {data.name!r}: {path} holds no experiences")
    return whole, f"{len(whole)}-{digest.hexdigest()[:16]}"


class _Formatted:
    """Converts records to experiences. Records that cannot be converted are left out, counted, and named in the log
    (the first :data:`NAMED`). Records that are too long are cut or left out, and counted.
    """

    def __init__(self, data: ExperienceBufferConfig, rows: Sequence[Record], codec: TextCodec, max_tokens: int) -> None:
        self._data, self._records, self._max_tokens = data, rows, max_tokens
        self._format, self._reader = find_formatter(data, codec), Reader(data.format, codec)
        self._unusable_count = 0

    def __call__(self, indexes: Sequence[int]) -> tuple[list[Experience], dict[str, float]]:
        experiences: list[Experience] = []
        unfit = too_long = 0
        for index in indexes:
            try:
                whole = self._format(self._reader, self._records[index])
            except (FormatError, TextError) as error:
                unfit += 1
                self._log_unusable(index, str(error))
                continue
            experience = fit_to_length(whole, self._max_tokens, self._data.too_long)
            too_long += experience is not whole
            if experience is not None:
                experience.taskset, experience.index = self._data.name, index
                experiences.append(experience)
        return experiences, {"data/unfit_records": float(unfit), "data/too_long": float(too_long)}

    def try_first(self) -> None:
        """Check that one of the first :data:`TRIED` records can be used.

        Raises:
            TasksetError: No record can be used.
        """
        reasons: dict[str, int] = {}
        for index, record in enumerate(self._records[:TRIED]):
            try:
                whole = self._format(self._reader, record)
            except (FormatError, TextError) as error:
                reasons.setdefault(f"record {index} {error}", index)
                continue
            if fit_to_length(whole, self._max_tokens, self._data.too_long) is not None:
                return
            reasons.setdefault(
                f"record {index} does not fit into model.max_model_len {self._max_tokens}: raise that, or set too_long "
                "to cut",
                index,
            )
        raise TasksetError(
            f"training data {self._data.name!r}: none of the first {min(TRIED, len(self._records))} records of "
            f"{self._data.path} can be used; {next(iter(reasons))}"
        )

    def _log_unusable(self, index: int, reason: str) -> None:
        self._unusable_count += 1
        if self._unusable_count <= NAMED:
            log.warning("record_left_out", data=self._data.name, record=index, reason=reason)
