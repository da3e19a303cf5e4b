"""Atomic checkpoints of the trainer, and a count of crashed train steps per ticket."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog
import xxhash
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trinity_mq.release import FIRST, VERSION
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.process import write_atomic
from trinity_mq.runtime.state_formats import format_of
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.training.guard import TrainingStopped

STATE_FILE = "trainer.json"
NEWEST_FORMAT = 1
"""Format of the checkpoints that this release writes, and the newest format that it reads."""
COUNTER_FILE = "generation"
CHOICE_FILE = "chosen.json"
_FOLDER = re.compile(r"progress-\d+")
_NAME = re.compile(r"(progress|step)-(\d+)")
READ_BYTES = 2**22
"""Number of bytes read at a time for a checksum."""
PROBE_BYTES = 2**20
Writer = Callable[[Path], Awaitable[str | None]]
"""Writes files into a folder. Returns the checksum of the weights among them, or None."""
log = structlog.get_logger(__name__)


class CheckpointError(FatalError):
    """A checkpoint, a counter or the final model could not be written, read or found; the message names the file, the
    cause and the remedy.
    """


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint have the right sizes but cannot be loaded. An earlier checkpoint may still load."""


class TrainerProgress(BaseModel):
    """State of a trainer apart from weights and optimizer, saved in each checkpoint."""

    model_config = ConfigDict(frozen=True)

    generation: int
    step: int
    """Number of train steps that changed the weights."""
    progress: int
    """Number of closed batches that the trainer has consumed."""
    source: dict[str, Any]
    """State of the experience source, opaque to this module; JSON."""
    run_id: str | None = None
    """Id of the run. None: written by an older release, or no explorer has reported an id."""


class _StateFile(BaseModel):
    format: int = 1
    """Format of the whole checkpoint, see :mod:`trinity_mq.runtime.state_formats`."""
    release: str = FIRST
    """Release that wrote the checkpoint."""
    state: TrainerProgress
    weights: str | None = None
    """Checksum of the weights that engines receive, see :func:`trinity_mq.sync.channels.buckets.total_digest`."""
    files: dict[str, int]
    """Size in bytes of every other file, by path inside the checkpoint."""
    checksums: dict[str, str] = Field(default_factory=dict)
    """XXH3 checksum (128 bits) of each of these files. Empty if an older release wrote the checkpoint."""


_Fields = TypeAdapter(dict[str, Any])


class _Choice(BaseModel):
    """The checkpoint that the next start resumes from, even if newer checkpoints exist."""

    name: str
    generation: int
    """Generation that saved the checkpoint."""
    before: int
    """Last generation at the time of the choice. The first checkpoint of a later generation ends the choice."""

    def means(self, checkpoint: Checkpoint) -> bool:
        """Return whether this choice refers to ``checkpoint``."""
        return (checkpoint.path.name, checkpoint.state.generation) == (self.name, self.generation)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainerProgress
    weights: str | None = None
    """Checksum of the weights; None if unknown."""
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Checksum by file name, for :func:`verify`."""

    @property
    def title(self) -> str:
        """Folder name, followed by the name by train step if it has a different number."""
        step_name = "" if self.state.step == self.state.progress else f" (step-{self.state.step})"
        return f"{self.path.name}{step_name}"


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that cannot be used."""

    path: Path
    reason: str


def find_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """Return the complete checkpoints in ``folder``, newest first, and the damaged checkpoints, most progress first.

    Checkpoints are ordered by generation, then by progress. So a late save of a trainer that was cut off comes after
    the checkpoints of the trainer that resumed the run, whatever its progress. The checkpoint selected by
    :func:`choose` comes before all others, until a trainer that resumed from it has saved a checkpoint.

    Raises:
        OSError: The folder, or the choice in it, cannot be read.
        NewerStateError: A newer release wrote one of the checkpoints.
    """
    whole: list[Checkpoint] = []
    damaged: list[DamagedCheckpoint] = []
    for path in _folders(folder):
        try:
            text = (path / STATE_FILE).read_text(encoding="utf-8")
            format_of(path / STATE_FILE, _Fields.validate_json(text), NEWEST_FORMAT)
            content = _StateFile.model_validate_json(text)
            for name, size in content.files.items():
                if (actual_size := (path / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {actual_size} bytes, wanted {size}")
        except ValidationError as error:
            damaged.append(DamagedCheckpoint(path, f"{STATE_FILE}: {error.errors()[0]['msg']}"))
        except (OSError, ValueError) as error:
            damaged.append(DamagedCheckpoint(path, str(error)))
        else:
            whole.append(Checkpoint(path, content.state, content.weights, content.checksums))
    whole.sort(key=lambda checkpoint: (checkpoint.state.generation, checkpoint.state.progress), reverse=True)
    if (choice := _open_choice(folder, whole)) is not None:
        whole.sort(key=lambda checkpoint: not choice.means(checkpoint))
    return whole, damaged


def verify(checkpoint: Checkpoint) -> None:
    """Check the checksums of all files of a checkpoint except :data:`STATE_FILE`, which holds them. A checkpoint
    without checksums, which an earlier release wrote, passes. Blocks.

    Raises:
        DamagedCheckpointError: A file cannot be read, or its content has changed.
    """
    for name, expected in checkpoint.checksums.items():
        try:
            checksum = _checksum(checkpoint.path / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error}") from error
        if checksum != expected:
            raise DamagedCheckpointError(
                f"{name} has the checksum {checksum}, wanted {expected}: its content has changed"
            )


def find_by_name(folder: Path, name: str) -> Checkpoint:
    """Return the checkpoint in ``folder`` with the given name: ``progress-120`` by its batches, or ``step-120`` by its
    train steps. If several checkpoints match, return the newest.

    Raises:
        CheckpointError: The name is malformed, the folder cannot be read, or the checkpoint does not exist or is
            damaged; the message names the usable checkpoints.
    """
    try:
        whole, damaged = find_checkpoints(folder) if folder.is_dir() else ([], [])
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error}") from error
    available = (
        ", ".join(checkpoint.title for checkpoint in sorted(whole, key=lambda checkpoint: checkpoint.state.progress))
        or "none"
    )
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{name!r} is not the name of a checkpoint, such as step-120 or progress-120; available: {available}"
        )
    kind, number = match[1], int(match[2])
    matches = [checkpoint for checkpoint in whole if getattr(checkpoint.state, kind) == number]
    if matches:
        return max(matches, key=lambda checkpoint: (checkpoint.state.generation, checkpoint.state.progress))
    for damaged_checkpoint in damaged:
        if kind == "progress" and _progress_of(damaged_checkpoint.path) == number:
            raise CheckpointError(
                f"{damaged_checkpoint.path} is damaged: {damaged_checkpoint.reason}; others in {folder}: {available}"
            )
    raise CheckpointError(f"there is no checkpoint {name} in {folder}; available: {available}")


def choose(folder: Path, checkpoint: Checkpoint) -> None:
    """Make the next trainer, which begins a new generation, resume from ``checkpoint``. The choice is written durably.

    Raises:
        CheckpointError: The choice cannot be written.
    """
    try:
        whole, _ = find_checkpoints(folder)
        before = max([_last_counted_generation(folder), *(existing.state.generation for existing in whole)])
        choice = _Choice(name=checkpoint.path.name, generation=checkpoint.state.generation, before=before)
        write_atomic(folder / CHOICE_FILE, choice.model_dump_json().encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot write {folder / CHOICE_FILE}: {error}; check space and permissions") from error


def _open_choice(folder: Path, whole: Iterable[Checkpoint]) -> _Choice | None:
    """Return the last choice in ``folder``. None: no choice exists, or a later trainer has saved a checkpoint.

    Raises:
        OSError: The choice cannot be read.
    """
    path = folder / CHOICE_FILE
    if not path.exists():
        return None
    try:
        choice = _Choice.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise OSError(
            f"{path} is damaged ({error.errors()[0]['msg']}); remove it to resume from the newest checkpoint"
        ) from error
    return choice if all(checkpoint.state.generation <= choice.before for checkpoint in whole) else None


def _last_counted_generation(folder: Path) -> int:
    """Return the last counted generation, 0 if none was counted."""
    counter = folder / COUNTER_FILE
    return int(counter.read_text()) if counter.exists() else 0


def _folders(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, most progress first."""
    return sorted((path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)), key=_progress_of, reverse=True)


def _progress_of(path: Path) -> int:
    return int(path.name.removeprefix("progress-"))


class CheckpointStore:
    """The checkpoints ``progress-<progress>`` in one folder. Only one trainer at a time writes to it."""

    def __init__(self, folder: Path, keep: int, keep_every: int | None = None) -> None:
        """Create the folder, and clean up the unfinished files of a killed trainer.

        Args:
            folder: Folder of the checkpoints.
            keep: Number of newest checkpoints to keep.
            keep_every: Interval in batches. The first checkpoint at or after each multiple of the interval is also
                kept.

        Raises:
            CheckpointError: The folder cannot be written.
        """
        self._folder = folder
        self._keep, self._keep_every = keep, keep_every
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in list(folder.iterdir()):
                final = folder / path.name.partition(".retired-")[2]
                if path.name.startswith(".partial-") or (path.name.startswith(".retired-") and final.exists()):
                    shutil.rmtree(path)
                elif path.name.startswith(".retired-"):
                    path.rename(final)
        except OSError as error:
            raise self._error("prepare the folder", error) from error

    def next_generation(self, after: int = 0) -> int:
        """Count one start of the trainer, durably, and return its generation, from 1. From now on trainers of earlier
        generations cannot save.

        Args:
            after: A generation known from another source. The result is larger.

        Raises:
            CheckpointError: The counter cannot be read or written.
        """
        try:
            whole, _ = find_checkpoints(self._folder)
            last = _last_counted_generation(self._folder)
            generation = max([last, after, *(checkpoint.state.generation for checkpoint in whole)]) + 1
            write_atomic(self._folder / COUNTER_FILE, f"{generation}\n".encode())
        except (OSError, ValueError) as error:
            raise self._error(f"count the start in {COUNTER_FILE}", error) from error
        return generation

    def usable(self) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
        """Return the result of :func:`find_checkpoints`, and log damaged checkpoints.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        try:
            whole, damaged = find_checkpoints(self._folder)
        except OSError as error:
            raise self._error("read the checkpoints", error) from error
        for checkpoint in damaged:
            log.warning("damaged_checkpoint_skipped", path=str(checkpoint.path), reason=checkpoint.reason)
        return whole, damaged

    def only(self, whole: Sequence[Checkpoint]) -> str | None:
        """Return the name of the checkpoint that :func:`choose` selected and that the run must resume from. None: the
        run may resume from any checkpoint in ``whole``.

        Raises:
            CheckpointError: The choice cannot be read.
        """
        try:
            choice = _open_choice(self._folder, whole)
        except OSError as error:
            raise self._error("read the checkpoints", error) from error
        return None if choice is None else choice.name

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, None if no checkpoint is complete. Log damaged checkpoints."""
        whole, _ = self.usable()
        return whole[0] if whole else None

    async def save(self, write: Writer, state: TrainerProgress) -> Checkpoint:
        """Save a checkpoint atomically: it is synced to disk and appears by a single rename once all files are written.

        A checkpoint of the same progress is replaced. If the save fails or is cancelled before the rename, existing
        checkpoints do not change. A save that is cancelled later is completed before the error is raised.

        Args:
            write: Writes files into the given folder, and returns the checksum of the weights or None.
            state: Trainer state saved next to these files; it determines the name of the checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written, for example because the disk is full; older
                checkpoints do not change.
            RestartRequested: A trainer of a newer generation has resumed the run.
        """
        final = self._folder / f"progress-{state.progress:06d}"
        partial = self._folder / f".partial-{final.name}-{uuid4().hex[:8]}"
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            try:
                await run_to_end(pool, lambda: self._check_generation(state))
                await run_to_end(pool, partial.mkdir)
                weights = await write(partial)
                checksums = await run_to_end(pool, lambda: self._commit(partial, final, state, weights))
            except RestartRequested:
                raise
            except Exception as error:
                with suppress(
                    OSError, ValueError
                ):  # The start of a newer trainer removes the partial files of an earlier trainer.
                    self._check_generation(state)
                cause = await run_to_end(pool, functools.partial(_cause, error, partial))
                raise self._error(f"save {final.name}", cause) from cause
            finally:
                await run_to_end(pool, lambda: shutil.rmtree(partial, ignore_errors=True))
        return Checkpoint(final, state, weights, checksums)

    def _commit(self, partial: Path, final: Path, state: TrainerProgress, weights: str | None) -> dict[str, str]:
        files = {path.relative_to(partial).as_posix(): path for path in sorted(partial.rglob("*")) if path.is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        checksums = {name: _checksum(path) for name, path in files.items()}
        content = _StateFile(
            format=NEWEST_FORMAT, release=VERSION, state=state, weights=weights, files=sizes, checksums=checksums
        )
        (partial / STATE_FILE).write_text(content.model_dump_json(indent=2), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        self._check_generation(state)
        retired = self._folder / f".retired-{final.name}"
        if final.exists():
            final.rename(retired)
        try:
            # Check again: this thread may have been suspended, and must not replace a checkpoint of a newer trainer.
            self._check_generation(state)
            partial.rename(final)
        except (OSError, RestartRequested):
            if retired.exists():
                retired.rename(final)
            raise
        _sync(self._folder)
        shutil.rmtree(retired, ignore_errors=True)
        self._prune()
        return checksums

    def check_generation(self, state: TrainerProgress) -> None:
        """Reject saves of a trainer whose run another trainer has taken over.

        Raises:
            RestartRequested: A newer generation exists.
            CheckpointError: The counter cannot be read.
        """
        try:
            self._check_generation(state)
        except (OSError, ValueError) as error:
            raise self._error(f"read {COUNTER_FILE}", error) from error

    def _check_generation(self, state: TrainerProgress) -> None:
        if (newest := _last_counted_generation(self._folder)) > state.generation:
            raise RestartRequested(
                f"another trainer has resumed this run as generation {newest}; this trainer, of generation "
                f"{state.generation}, saves nothing and restarts from there"
            )

    def _prune(self) -> None:
        """Remove all complete checkpoints except the newest ``keep`` and the checkpoints protected by ``keep_every``.
        Damaged checkpoints with at least as much progress as the oldest of the newest ``keep`` stay for inspection.
        """
        whole, damaged = find_checkpoints(self._folder)
        if len(whole) < self._keep:
            return
        progress = whole[self._keep - 1].state.progress
        stay = set(milestones(self._keep_every, (checkpoint.state.progress for checkpoint in whole)))
        old = [checkpoint.path for checkpoint in whole[self._keep :] if checkpoint.state.progress not in stay]
        old += [checkpoint.path for checkpoint in damaged if _progress_of(checkpoint.path) < progress]
        for path in old:
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("old_checkpoint_not_removed", path=str(path), reason=str(error))

    def _error(self, what: str, error: Exception) -> CheckpointError:
        try:
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.0f} MiB are free there"
        except OSError:
            free = "the folder does not exist"
        return CheckpointError(
            f"cannot {what} in {self._folder}: {error}; {free}. Check space and permissions, then start again: "
            "checkpoints that were there before are untouched"
        )


def milestones(every: int | None, progress: Iterable[int]) -> list[int]:
    """Return, for each positive multiple of ``every``, the first value of ``progress`` at or after it and before the
    next multiple. Return an empty list if ``every`` is None.
    """
    if every is None:
        return []
    firsts: dict[int, int] = {}
    for batches in sorted(progress):
        firsts.setdefault(batches // every, batches)
    return [batches for multiple, batches in firsts.items() if multiple]


async def publish_final(write: Callable[[Path], Awaitable[None]], final: Path) -> None:
    """Write a folder with ``write``, and publish it under the path ``final``: complete and synced to disk, or not at
    all. If ``write`` creates no folder, nothing is published. A link at this path is replaced, and its target stays.
    After an error no unfinished folder stays.

    Raises:
        CheckpointError: The folder cannot be written, for example because the disk is full.
    """
    fresh = final.with_name(f".{final.name}.part")
    try:
        await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
        await write(fresh)
        if await asyncio.to_thread(fresh.exists):
            await asyncio.to_thread(_publish, fresh, final)
    except Exception as error:
        cause = await asyncio.to_thread(_cause, error, fresh)
        await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(
            f"cannot write the final model to {final}: {cause}; check space and permissions, then start again"
        ) from cause


def _publish(fresh: Path, final: Path) -> None:
    for path in (*fresh.rglob("*"), fresh):
        _sync(path)
    if final.is_symlink():  # a folder cannot replace a link, and the folder that it leads to may be needed elsewhere
        final.unlink()
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    _sync(final.parent)


class StepAttempts:
    """Counts the crashed starts of train steps per ticket. A batch that kills the trainer has a high count.

    A start does not count if its step ends or is cancelled, if the guard stops the training, or if the process is asked
    to end during the step. In the last case a kill after the grace period says nothing about the batch.

    The counts are in a file in the checkpoint folder, replaced atomically but not synced: they must survive the
    process, not the machine.
    """

    def __init__(self, folder: Path) -> None:
        """Read the counts in ``folder``; an unreadable file counts as empty.

        Raises:
            CheckpointError: The process lacks permission to read the file.
        """
        self._path = folder / "attempts.json"
        self._starts: dict[str, int] = {}
        self._running: frozenset[str] = frozenset()
        self._is_ending = False
        try:
            if self._path.exists():
                self._starts = {str(ticket): int(n) for ticket, n in json.loads(self._path.read_text()).items()}
        except (ValueError, AttributeError, TypeError) as error:
            log.warning("step_attempts_unreadable", path=str(self._path), reason=str(error))
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error}; give the trainer access to it") from error

    @property
    def known(self) -> list[str]:
        """Tickets with crashed starts."""
        return list(self._starts)

    def starts(self, ticket: str) -> int:
        """Return the number of crashed starts of ``ticket``."""
        return self._starts.get(ticket, 0)

    def begin(self, tickets: Iterable[str]) -> None:
        """Count a start of each ticket, before its train step. After :meth:`withdraw` do nothing.

        Raises:
            CheckpointError: The counts cannot be written.
        """
        if not self._is_ending:
            self._running = frozenset(tickets)
            self._write(self._starts | {ticket: self.starts(ticket) + 1 for ticket in self._running})

    @contextmanager
    def noted(self, tickets: Collection[str]) -> Iterator[None]:
        """Count a start of each ticket for the train step in the ``with`` block. The count is removed if the step ends,
        is cancelled or stops the training; after any other error it stays.

        Raises:
            CheckpointError: The counts cannot be written.
        """
        self.begin(tickets)
        try:
            yield
        except (asyncio.CancelledError, TrainingStopped):
            self.withdraw()
            raise
        finally:
            self._running = frozenset()
        self.finish(tickets)

    def withdraw(self) -> None:
        """Take back the count of the current step, and count no later starts, because this process is about to end.

        Raises:
            CheckpointError: The counts cannot be written.
        """
        self._is_ending = True
        if self._running:
            counts = {ticket: starts - (ticket in self._running) for ticket, starts in self._starts.items()}
            self._running = frozenset()
            self._write({ticket: starts for ticket, starts in counts.items() if starts})

    def finish(self, tickets: Iterable[str]) -> None:
        """Remove the counts of tickets whose step has ended.

        Raises:
            CheckpointError: The counts cannot be written.
        """
        done = set(tickets)
        self._write({ticket: starts for ticket, starts in self._starts.items() if ticket not in done})

    def _write(self, starts: dict[str, int]) -> None:
        try:
            new = self._path.with_name(f".{self._path.name}.new")
            new.write_text(json.dumps(starts), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error}; check space and permissions") from error
        self._starts = starts


def _checksum(path: Path) -> str:
    """Return the XXH3 (128 bits) of a file's content."""
    checksum = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            checksum.update(block)
    return checksum.hexdigest()


def _cause(error: Exception, folder: Path) -> Exception:
    """Return the disk error if the disk of ``folder`` accepts no more data, because torch and safetensors hide this
    cause; else ``error``.
    """
    if isinstance(error, OSError) or not folder.exists():
        return error
    try:
        with (folder / ".probe").open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as trouble:
        return trouble
    return error


def _sync(path: Path) -> None:
    """Flush the file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
