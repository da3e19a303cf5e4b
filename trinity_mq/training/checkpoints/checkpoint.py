"""Atomic checkpoints of the trainer, and a count of the train steps that crashed per ticket."""

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
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.state_formats import format_of
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.training.guard import TrainingStopped

STATE_FILE = "trainer.json"
NEWEST_FORMAT = 1
"""Format of a checkpoint that this release writes, and the newest that it reads."""
COUNTER_FILE = "generation"
CHOICE_FILE = "chosen.json"
_FOLDER = re.compile(r"progress-\d+")
_NAME = re.compile(r"(progress|step)-(\d+)")
READ_BYTES = 2**22
"""Bytes of a file summed up at once."""
PROBE_BYTES = 2**20
Writer = Callable[[Path], Awaitable[str | None]]
"""Writes files into a folder; returns the checksum of the weights among them, if there is one."""
log = structlog.get_logger(__name__)


class CheckpointError(FatalError):
    """A checkpoint or counter could not be written or read; the message says which, why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint have the right sizes, but cannot be loaded; the one before it may do."""


class TrainerState(BaseModel):
    """State of a trainer besides weights and optimizer, saved in each checkpoint."""

    model_config = ConfigDict(frozen=True)

    generation: int
    step: int
    """Train steps that changed the weights."""
    progress: int
    """Closed batches consumed."""
    source: dict[str, Any]
    """The source's own state, opaque here; JSON."""
    run_id: str | None = None
    """Id of the run; None: of an older release, or no explorer has told it."""


class _StateFile(BaseModel):
    format: int = 1
    """Format of the whole checkpoint, as :mod:`trinity_mq.runtime.state_formats` says."""
    release: str = FIRST
    """The release that wrote it."""
    state: TrainerState
    weights: str | None = None
    """Checksum of the weights as engines get them, see :func:`trinity_mq.sync.channels.buckets.total_digest`."""
    files: dict[str, int]
    """Size in bytes of every other file, by path inside the checkpoint."""
    checksums: dict[str, str] = Field(default_factory=dict)
    """XXH3 (128 bits) of each of them; none: written by an older release."""


_Fields = TypeAdapter(dict[str, Any])


class _Choice(BaseModel):
    """A checkpoint from which the next start goes on, however new others are."""

    name: str
    generation: int
    """The checkpoint's."""
    before: int
    """The last generation at the time of the choice, which ends with the first checkpoint of a later one."""

    def means(self, checkpoint: Checkpoint) -> bool:
        """Return whether it is this one."""
        return (checkpoint.path.name, checkpoint.state.generation) == (self.name, self.generation)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: TrainerState
    weights: str | None = None
    """Checksum of the weights; None: not known."""
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By file, for :func:`verify`."""

    @property
    def title(self) -> str:
        """Its name, and its other one where that differs."""
        other = "" if self.state.step == self.state.progress else f" (step-{self.state.step})"
        return f"{self.path.name}{other}"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that cannot be used."""

    path: Path
    reason: str


def find_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Damaged]]:
    """Return the whole checkpoints in ``folder``, newest first, and the damaged ones, most progress first.

    The newest is the newest generation's: a late save of a trainer that was cut off does not count before those of the
    trainer that went on, however much progress it has. Before all others comes the one that :func:`choose` chose, until
    a trainer that went on from it has saved one.

    Raises:
        OSError: The folder cannot be read.
        NewerStateError: A newer release wrote one of them.
    """
    whole: list[Checkpoint] = []
    damaged: list[Damaged] = []
    for path in _folders(folder):
        try:
            text = (path / STATE_FILE).read_text(encoding="utf-8")
            format_of(path / STATE_FILE, _Fields.validate_json(text), NEWEST_FORMAT)
            content = _StateFile.model_validate_json(text)
            for name, size in content.files.items():
                if (seen := (path / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {seen} bytes, wanted {size}")
        except ValidationError as error:
            damaged.append(Damaged(path, f"{STATE_FILE}: {error.errors()[0]['msg']}"))
        except (OSError, ValueError) as error:
            damaged.append(Damaged(path, str(error)))
        else:
            whole.append(Checkpoint(path, content.state, content.weights, content.checksums))
    whole.sort(key=lambda one: (one.state.generation, one.state.progress), reverse=True)
    if (choice := _open_choice(folder, whole)) is not None:
        whole.sort(key=lambda one: not choice.means(one))
    return whole, damaged


def verify(checkpoint: Checkpoint) -> None:
    """Read all files of a checkpoint, and return if they hold what was written; blocks.

    Raises:
        DamagedCheckpointError: One does not, or cannot be read.
    """
    for name, expected in checkpoint.checksums.items():
        try:
            found = _checksum(checkpoint.path / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error}") from error
        if found != expected:
            raise DamagedCheckpointError(f"{name} has the checksum {found}, wanted {expected}: its content has changed")


def named(folder: Path, name: str) -> Checkpoint:
    """Return the checkpoint in ``folder`` that ``name`` means: ``progress-120`` by its batches, or ``step-120`` by its
    train steps; of several with so many steps the newest.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged; names those that can be used.
    """
    try:
        whole, damaged = find_checkpoints(folder) if folder.is_dir() else ([], [])
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error}") from error
    there = ", ".join(one.title for one in sorted(whole, key=lambda one: one.state.progress)) or "none"
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name!r} is no name of a checkpoint, such as step-120 or progress-120; there: {there}")
    kind, number = match[1], int(match[2])
    found = [one for one in whole if getattr(one.state, kind) == number]
    if found:
        return max(found, key=lambda one: (one.state.generation, one.state.progress))
    for one in damaged:
        if kind == "progress" and _progress_of(one.path) == number:
            raise CheckpointError(f"{one.path} is damaged: {one.reason}; others in {folder}: {there}")
    raise CheckpointError(f"there is no checkpoint {name} in {folder}; there: {there}")


def choose(folder: Path, checkpoint: Checkpoint) -> None:
    """Have the next trainer go on from ``checkpoint``, durably; it begins a new generation there.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        whole, _ = find_checkpoints(folder)
        before = max([_counted(folder), *(one.state.generation for one in whole)])
        choice = _Choice(name=checkpoint.path.name, generation=checkpoint.state.generation, before=before)
        _replace(folder / CHOICE_FILE, choice.model_dump_json(), durable=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot write {folder / CHOICE_FILE}: {error}; check space and permissions") from error


def _open_choice(folder: Path, whole: Iterable[Checkpoint]) -> _Choice | None:
    """Return the last choice in ``folder``, None where there is none, or a trainer has saved since.

    Raises:
        OSError: It cannot be read.
    """
    path = folder / CHOICE_FILE
    if not path.exists():
        return None
    try:
        choice = _Choice.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise OSError(f"{path} is damaged ({error.errors()[0]['msg']}); remove it to go on from the newest") from error
    return choice if all(one.state.generation <= choice.before for one in whole) else None


def _counted(folder: Path) -> int:
    """Return the last generation that was counted, 0 where there was none."""
    counter = folder / COUNTER_FILE
    return int(counter.read_text()) if counter.exists() else 0


def _folders(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, most progress first."""
    return sorted((path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)), key=_progress_of, reverse=True)


def _progress_of(path: Path) -> int:
    return int(path.name.removeprefix("progress-"))


class CheckpointStore:
    """The checkpoints ``progress-<progress>`` in one folder, which one trainer at a time writes."""

    def __init__(self, folder: Path, keep: int, keep_every: int | None = None) -> None:
        """Make the folder, and clear away what a killed trainer left half done.

        Args:
            folder: Where they are.
            keep: How many of the newest stay.
            keep_every: Of each so many batches, the first checkpoint at their end or after it stays too.

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
        """Count one start of the trainer, durably, and return its number, from 1: from now on trainers of earlier
        generations save nothing.

        Args:
            after: A generation known from elsewhere, which the number exceeds too.

        Raises:
            CheckpointError: The counter cannot be read or written.
        """
        try:
            whole, _ = find_checkpoints(self._folder)
            found = max([self._last_generation(), after, *(one.state.generation for one in whole)]) + 1
            _replace(self._folder / COUNTER_FILE, f"{found}\n", durable=True)
        except (OSError, ValueError) as error:
            raise self._error(f"count the start in {COUNTER_FILE}", error) from error
        return found

    def _last_generation(self) -> int:
        return _counted(self._folder)

    def usable(self) -> tuple[list[Checkpoint], list[Damaged]]:
        """Return what :func:`find_checkpoints` returns; damaged ones are logged.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        try:
            whole, damaged = find_checkpoints(self._folder)
        except OSError as error:
            raise self._error("read the checkpoints", error) from error
        for one in damaged:
            log.warning("damaged_checkpoint_skipped", path=str(one.path), reason=one.reason)
        return whole, damaged

    def only(self, whole: Sequence[Checkpoint]) -> str | None:
        """Return the name of the one checkpoint in ``whole`` that may be gone on from, None where any may.

        Raises:
            CheckpointError: The choice cannot be read.
        """
        try:
            choice = _open_choice(self._folder, whole)
        except OSError as error:
            raise self._error("read the checkpoints", error) from error
        return None if choice is None else choice.name

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, None if there is none; damaged ones are logged."""
        whole, _ = self.usable()
        return whole[0] if whole else None

    async def save(self, write: Writer, state: TrainerState) -> Checkpoint:
        """Make a checkpoint: it appears, synced to disk, by one rename when all of it is written.

        A checkpoint of the same progress is replaced. Cancelled or failed, it leaves everything as it was.

        Args:
            write: Writes files into the folder that it is given, and returns the checksum of the weights or None.
            state: Goes beside them; names the checkpoint.

        Raises:
            CheckpointError: It could not be written, such as for a full disk; older checkpoints are untouched.
            RestartMe: A trainer of a newer generation has gone on with the run.
        """
        final = self._folder / f"progress-{state.progress:06d}"
        partial = self._folder / f".partial-{final.name}-{uuid4().hex[:8]}"
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            try:
                await run_to_end(pool, lambda: self._check_generation(state))
                await run_to_end(pool, partial.mkdir)
                weights = await write(partial)
                checksums = await run_to_end(pool, lambda: self._commit(partial, final, state, weights))
            except RestartMe:
                raise
            except Exception as error:
                with suppress(
                    OSError, ValueError
                ):  # a newer trainer's start removes what an earlier one left half done
                    self._check_generation(state)
                cause = await run_to_end(pool, functools.partial(_cause, error, partial))
                raise self._error(f"save {final.name}", cause) from cause
            finally:
                await run_to_end(pool, lambda: shutil.rmtree(partial, ignore_errors=True))
        return Checkpoint(final, state, weights, checksums)

    def _commit(self, partial: Path, final: Path, state: TrainerState, weights: str | None) -> dict[str, str]:
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
            # again: nobody puts another in the place of the one in hand, however long this thread stood still
            self._check_generation(state)
            partial.rename(final)
        except (OSError, RestartMe):
            if retired.exists():
                retired.rename(final)
            raise
        _sync(self._folder)
        shutil.rmtree(retired, ignore_errors=True)
        self._prune()
        return checksums

    def check_generation(self, state: TrainerState) -> None:
        """Refuse to save for a trainer that another has taken over from.

        Raises:
            RestartMe: There is a newer generation.
            CheckpointError: The counter cannot be read.
        """
        try:
            self._check_generation(state)
        except (OSError, ValueError) as error:
            raise self._error(f"read {COUNTER_FILE}", error) from error

    def _check_generation(self, state: TrainerState) -> None:
        if (newest := self._last_generation()) > state.generation:
            raise RestartMe(
                f"another trainer has gone on with this run as generation {newest}; this one, of generation "
                f"{state.generation}, saves nothing and starts anew from there"
            )

    def _prune(self) -> None:
        """Remove all whole checkpoints but the newest ``keep`` and those that ``keep_every`` keeps; damaged ones with
        more progress than the last of the newest stay for a look.
        """
        whole, damaged = find_checkpoints(self._folder)
        if len(whole) < self._keep:
            return
        progress = whole[self._keep - 1].state.progress
        stay = set(first_of_each(self._keep_every, (one.state.progress for one in whole)))
        old = [one.path for one in whole[self._keep :] if one.state.progress not in stay]
        old += [one.path for one in damaged if _progress_of(one.path) < progress]
        for path in old:
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("old_checkpoint_not_removed", path=str(path), reason=str(error))

    def _error(self, what: str, error: Exception) -> CheckpointError:
        try:
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.0f} MiB are free there"
        except OSError:
            free = "the folder is not there"
        return CheckpointError(
            f"cannot {what} in {self._folder}: {error}; {free}. Check space and permissions, then start again: "
            "checkpoints that were there before are untouched"
        )


def first_of_each(every: int | None, progress: Iterable[int]) -> list[int]:
    """Return the first of ``progress`` at or after each multiple of ``every`` and before the next; none without it."""
    if every is None:
        return []
    firsts: dict[int, int] = {}
    for one in sorted(progress):
        firsts.setdefault(one // every, one)
    return [one for multiple, one in firsts.items() if multiple]


async def publish_final(write: Callable[[Path], Awaitable[None]], final: Path) -> None:
    """Put what ``write`` writes into a folder at ``final``, whole and synced to disk or not at all.

    Raises:
        CheckpointError: It cannot be written.
    """
    fresh = final.with_name(f".{final.name}.part")
    try:
        await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
        await write(fresh)
        if await asyncio.to_thread(fresh.exists):
            await asyncio.to_thread(_put, fresh, final)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the final model to {final}: {error}; check space and permissions, then start again"
        ) from error


def _put(fresh: Path, final: Path) -> None:
    for path in (*fresh.rglob("*"), fresh):
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    _sync(final.parent)


class StepAttempts:
    """Count of starts per ticket that crashed in the middle: a batch that kills the trainer shows by its count.

    A start counts unless its step ends or is called off, the guard stops the training, or the process is asked to end
    meanwhile: a step that is then cut off, by a kill after the grace too, says nothing of its batch.

    A file in the checkpoint folder, replaced at once but not synced: it has to survive the process, not the machine.
    """

    def __init__(self, folder: Path) -> None:
        """Read the counts in ``folder``; an unreadable file counts as none.

        Raises:
            CheckpointError: Not permitted to read it.
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
        """What has starts that crashed."""
        return list(self._starts)

    def starts(self, ticket: str) -> int:
        """Return how many starts of ``ticket`` crashed."""
        return self._starts.get(ticket, 0)

    def begin(self, tickets: Iterable[str]) -> None:
        """Note a start of each ticket, before its step.

        Raises:
            CheckpointError: It cannot be written.
        """
        if not self._is_ending:
            self._running = frozenset(tickets)
            self._write(self._starts | {ticket: self.starts(ticket) + 1 for ticket in self._running})

    @contextmanager
    def noted(self, tickets: Collection[str]) -> Iterator[None]:
        """Note a start of each ticket for the step in the ``with`` block.

        Raises:
            CheckpointError: It cannot be written.
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
        """Do not count the start of the step under way, nor later ones: this process was asked to end.

        Raises:
            CheckpointError: It cannot be written.
        """
        self._is_ending = True
        if self._running:
            left = {ticket: starts - (ticket in self._running) for ticket, starts in self._starts.items()}
            self._running = frozenset()
            self._write({ticket: starts for ticket, starts in left.items() if starts})

    def finish(self, tickets: Iterable[str]) -> None:
        """Forget the starts of tickets whose step has ended.

        Raises:
            CheckpointError: It cannot be written.
        """
        done = set(tickets)
        self._write({ticket: starts for ticket, starts in self._starts.items() if ticket not in done})

    def _write(self, starts: dict[str, int]) -> None:
        try:
            _replace(self._path, json.dumps(starts), durable=False)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error}; check space and permissions") from error
        self._starts = starts


def _checksum(path: Path) -> str:
    """Return the XXH3 (128 bits) of a file's content."""
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            found.update(block)
    return found.hexdigest()


def _cause(error: Exception, folder: Path) -> Exception:
    """Return why the disk of ``folder`` takes no more files if that is so, which torch hides, else ``error``."""
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
    """Have the file or folder on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str, *, durable: bool) -> None:
    """Put ``text`` in the place of ``path``: a reader finds the old content or the new."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    if durable:
        _sync(new)
    new.replace(path)
    if durable:
        _sync(path.parent)
