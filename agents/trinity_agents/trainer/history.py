"""History of decided tickets and saved checkpoints: one append-only JSON lines file per generation of the trainer."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trinity_mq.errors import excerpt
from trinity_mq.messages.base import BatchId
from trinity_mq.messages.batches import StepOutcome
from trinity_mq.release import VERSION
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.state_formats import FORMAT, RELEASE, format_of

NEWEST_FORMAT = 1
"""Format number in the first line of each file: this release writes it, and reads no newer format."""


class HistoryError(FatalError):
    """The history cannot be written, or does not lead to the checkpoint; the message names the broken place."""


@dataclass(frozen=True)
class StreamPosition:
    """Place on the ``ready`` stream of the set that decided a ticket."""

    offset: int
    """Offset of its BatchReady."""
    chunks: list[int]
    """Offsets of its chunks."""
    experiences: int
    """Number of experiences that the BatchReady announces."""


@dataclass
class Lineage:
    """Content of a checkpoint's history, and its faults."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """Entries in order; incomplete if a file is missing or damaged."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(generation, first progress, last progress) of each generation, in order."""
    faults: list[str] = field(default_factory=list)
    """Messages about missing, damaged or misordered content."""


class History:
    """History file of this start of the trainer, its generation. :meth:`record` returns once the operating system has
    the line; :meth:`sync` writes the lines to disk.
    """

    def __init__(self, folder: Path, generation: int, resumed_from: tuple[int, int] | None) -> None:
        """Start the file ``<generation>.jsonl``.

        Args:
            folder: Folder of the history files, created if missing.
            generation: Number of this start of the trainer; each start needs a new number.
            resumed_from: ``(generation, progress)`` of the checkpoint to resume from, None for a fresh start.

        Raises:
            HistoryError: The generation already has a history, or the folder cannot be written.
        """
        path = folder / f"{generation}.jsonl"
        origin = None if resumed_from is None else {"generation": resumed_from[0], "progress": resumed_from[1]}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8", buffering=1)
        except OSError as error:
            raise HistoryError(
                f"cannot start the history {path}: {error}; each start needs a new generation"
            ) from error
        self._append({"generation": generation, "resumed_from": origin, FORMAT: NEWEST_FORMAT, RELEASE: VERSION})

    def record(
        self,
        *,
        progress: int,
        step: int,
        batch: BatchId,
        ticket: str,
        op: str,
        outcome: StepOutcome,
        uids: Sequence[str],
        repaired: bool = False,
        dropped: int = 0,
        replayed: Sequence[str] = (),
        stream: StreamPosition | None = None,
    ) -> None:
        """Record a decided ticket, before any checkpoint that contains the ticket is saved.

        Args:
            progress: Number of consumed batches, including this batch; rises by one with each line that is not
                ``repaired``.
            step: Number of train steps that changed the weights, including this step.
            batch: Number of the ticket's batch.
            ticket: The ticket.
            op: The processing that decided the ticket.
            outcome: Outcome of the batch.
            uids: Uids of the experiences trained on.
            repaired: The ticket was recorded as failed before, and was trained on with the batch of the previous
                line that is not ``repaired``.
            dropped: Number of experiences of the set that were too old.
            replayed: Groups of earlier tickets that were trained on again with this batch.
            stream: Place of the set on the ``ready`` stream.

        Raises:
            HistoryError: The line cannot be written.
        """
        entry = {"progress": progress, "step": step, "batch": batch, "ticket": ticket, "op": op, "outcome": outcome}
        more: dict[str, Any] = {} if stream is None else {"stream": asdict(stream), "dropped": dropped}
        if replayed:
            more["replayed"] = list(replayed)
        self._append(entry | {"uids": list(uids)} | more | ({"repaired": True} if repaired else {}))

    def sync(self) -> None:
        """Flush all lines to disk, so that a checkpoint never outlives the lines that it needs.

        Raises:
            HistoryError: The lines cannot be written.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise HistoryError(f"cannot write the history {self._file.name}: {error}; check the space there") from error

    def saved(self, progress: int) -> None:
        """Record that a checkpoint at ``progress`` was saved, so that the loss of this checkpoint is detected later.

        Raises:
            HistoryError: The line cannot be written.
        """
        self._append({"saved": progress})

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise HistoryError(f"cannot write the history {self._file.name}: {error}; check the space there") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def last_generation(folder: Path) -> int:
    """Return the highest generation that has a history in ``folder``, 0 without a history."""
    return max((int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal()), default=0)


def last_progress(folder: Path) -> int:
    """Return the highest progress of all generations with a history in ``folder``, 0 without a history.

    Raises:
        HistoryError: A file is unreadable.
    """
    highest = 0
    for path in folder.glob("*.jsonl"):
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise HistoryError(f"cannot read the history {path}: {error}") from error
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # the last line of a killed process may be cut off
                if "progress" in (entry := json.loads(line)):
                    highest = max(highest, int(entry["progress"]))
                    break
    return highest


def last_saved(folder: Path) -> int | None:
    """Return the progress of the newest generation's last checkpoint: the checkpoint that it saved last, else the
    checkpoint from which it resumed. Return None if no checkpoint was saved.

    Raises:
        HistoryError: A file is unreadable.
    """
    for generation in range(last_generation(folder), 0, -1):
        path = folder / f"{generation}.jsonl"
        if not path.exists() or not path.stat().st_size:
            continue  # the trainer of this generation ended before it had written its history
        header, *entries = _read(path)
        saved = [entry["saved"] for entry in entries if "saved" in entry]
        origin = header.get("resumed_from")
        if saved:
            return int(saved[-1])
        if origin is not None:
            return int(origin["progress"])
    return None


def lineage(folder: Path, generation: int, progress: int) -> list[dict[str, Any]]:
    """Return the entries that lead to the checkpoint of ``generation`` at ``progress``.

    The entries have progress 1, 2, ... in order; each is followed by the ``repaired`` entries of the same train step,
    if any. Entries that a generation recorded after the checkpoint from which the next generation resumed are left out.

    Raises:
        HistoryError: A file is missing or unreadable, or an entry is missing.
    """
    line = trace(folder, generation, progress)
    if line.faults:
        raise HistoryError(line.faults[0])
    return line.entries


def trace(folder: Path, generation: int, progress: int) -> Lineage:
    """Return the entries of :func:`lineage`, and a list of all faults instead of an error."""
    line = Lineage()
    end, current = progress, generation
    while True:
        path = folder / f"{current}.jsonl"
        try:
            header, *entries = _read(path)
            origin = header.get("resumed_from")
            start = 0 if origin is None else int(origin["progress"])
            before = 0 if origin is None else int(origin["generation"])
        except HistoryError as error:
            line.faults.append(str(error))
            return line
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            line.faults.append(f"{path} does not begin with a header: {error!r}")
            return line
        if header.get("generation") != current:
            line.faults.append(f"{path} is of generation {header.get('generation')}, wanted {current}")
        generation_entries = [entry for entry in entries if start < entry.get("progress", start) <= end]
        line.entries[:0] = generation_entries
        line.spans.insert(0, (current, start + 1, end))
        numbers = [entry["progress"] for entry in generation_entries if not entry.get("repaired")]
        if numbers != list(range(start + 1, end + 1)):
            line.faults.append(
                f"{path} should hold progress {start + 1} to {end}, each once, in order; {_diff(numbers, start, end)}"
            )
        if origin is None:
            return line
        if before >= current:
            line.faults.append(f"{path} says that it continues generation {before}, which is not before {current}")
            return line
        if start == 0:
            return line  # a generation that ended before its first batch may have no file
        end, current = start, before


def _diff(progresses: Sequence[int], start: int, end: int) -> str:
    counts = Counter(progresses)
    missing = [number for number in range(start + 1, end + 1) if number not in counts]
    duplicates = sorted(number for number, count in counts.items() if count > 1)
    if missing or duplicates:
        return "; ".join(
            f"{what}: {excerpt(numbers)}" for what, numbers in (("missing", missing), ("double", duplicates)) if numbers
        )
    return "its lines are in another order"


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, the header first; a truncated last line (of a killed process) is left out.

    Raises:
        HistoryError: The file cannot be read, or a line is damaged.
        NewerStateError: A newer release wrote the file.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise HistoryError(f"cannot read the history {path}: {error}") from error
    result: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise HistoryError(f"{path}, line {number} is not JSON: {error}") from error
            break
        if not isinstance(entry, dict) or not isinstance(entry.get("progress", 0), int):
            raise HistoryError(f"{path}, line {number} is not a line of a history: {line[:80]!r}")
        result.append(entry)
    if not result:
        raise HistoryError(f"{path} is empty, wanted a header line")
    try:
        format_of(path, result[0], NEWEST_FORMAT)
    except ValueError as error:
        raise HistoryError(str(error)) from error
    return result
