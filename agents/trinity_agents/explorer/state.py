"""The explorer's saved state with the closed batches that the trainer has not consumed yet, and its database file."""

from __future__ import annotations

import asyncio
import errno
import itertools
import sqlite3
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
from pydantic import BaseModel, Field, ValidationError

from trinity_mq.data import TaskStats
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.messages import BatchClosed, SubmissionOutcome, TaskBody
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.state_formats import check_readable_format

MANIFEST_LOST_AFTER = 15.0
"""Idle seconds after which the queue ``closed`` is checked for a manifest; longer than a heartbeat lease."""
RecoveryAction = Literal["publish again", "tombstone"]

NEWEST_FORMAT = 1
"""Format number in the database's ``user_version``: this release writes it, and reads no newer format. Release 0.1.0
left it at 0, which also means format 1."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS part (name TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS submission (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS observation (number INTEGER PRIMARY KEY, ticket TEXT UNIQUE NOT NULL, body BLOB NOT NULL);
"""
IN_ROWS_OF_THEIR_OWN = {"tickets", "following", "pending", "accepted", "observations"}
"""Fields of the state whose content has its own rows. The row ``core`` holds only their small parts, such as the row
numbers of pending tasks."""
TICKET_ROWS = {"tasks", "slices", "submissions", "manifest"}
FOLLOWING_ROWS = {"manifest", "promises", "tasks"}
LOCK_SECONDS = 30.0
"""Maximum seconds that a database access waits for the lock of another process."""


class PendingTask(BaseModel):
    """A task of the next batch: submitted from outside, requeued because it was unfinished or stale, or just read from
    the taskset. Only tasks of the first two kinds are in the saved state.
    """

    task: TaskBody
    submission: SubmissionRef | None = None
    given_back: bool = False
    """True if the task was requeued from an earlier batch; a task is requeued only once."""


class SubmittedTask(BaseModel):
    """A submitted task whose submitter waits for experiences, with the task's outcome."""

    submission: SubmissionRef
    outcome: SubmissionOutcome


class InFlightBatch(BaseModel):
    """A closed batch for which no progress of the trainer has arrived."""

    manifest: BatchClosed
    promises: list[SubmittedTask] = Field(default_factory=list)
    tasks: dict[int, TaskBody] = Field(default_factory=dict)
    """Tasks by id that are requeued if their groups are too old to train on."""
    idle: float = 0.0
    """Seconds since an operator or the trainer last worked on the batch, or since the last recovery action."""
    tries: int = 1
    buried: bool = False
    looked: bool = Field(default=False, exclude=True)
    """True once the queue ``closed`` was checked after :data:`MANIFEST_LOST_AFTER`; not saved."""

    def returned(self, stale: Collection[int]) -> list[PendingTask]:
        """Return the tasks to requeue, ordered by id: the tasks in :attr:`tasks` whose ids are in ``stale``."""
        return [PendingTask(task=self.tasks[n], given_back=True) for n in sorted(set(stale)) if n in self.tasks]


class InFlightBatches(BaseModel):
    """Follows manifests until their ``Progress`` arrives (docs/learning.md)."""

    tickets: dict[str, InFlightBatch] = Field(default_factory=dict)

    def add(
        self, manifest: BatchClosed, promises: Sequence[SubmittedTask] = (), tasks: Mapping[int, TaskBody] | None = None
    ) -> None:
        """Follow a manifest; ``tasks`` are requeued if their groups turn out too old."""
        closed = InFlightBatch(manifest=manifest, promises=list(promises), tasks=dict(tasks or {}))
        self.tickets.setdefault(manifest.ticket, closed)

    def tick(
        self, seconds: float, in_hand: Collection[str], *, deadline: float, max_tries: int
    ) -> list[tuple[RecoveryAction, BatchClosed]]:
        """Advance the idle clocks by ``seconds`` and return the due recovery actions.

        An action is due each time a batch was idle for ``deadline`` seconds: its manifest is published again, up to
        ``max_tries`` publishes in all, after that its tombstone. ``in_hand`` has the tickets on which a living operator
        or the trainer works; their idle clocks restart at 0.
        """
        actions: list[tuple[RecoveryAction, BatchClosed]] = []
        for name, closed in self.tickets.items():
            if name in in_hand:
                closed.idle, closed.looked = 0.0, False
                continue
            closed.idle += seconds
            if closed.idle < deadline:
                continue
            closed.idle = 0.0
            if closed.tries < max_tries:
                closed.tries += 1
                actions.append(("publish again", closed.manifest))
            else:
                closed.buried = True
                actions.append(("tombstone", closed.manifest))
        return actions

    def unseen(self) -> list[BatchClosed]:
        """Return the manifests of batches that have been idle for :data:`MANIFEST_LOST_AFTER` seconds. A batch is
        returned again only after an operator or the trainer has worked on it.

        These manifests are lost if the queue ``closed`` is empty.
        """
        unseen = [batch for batch in self.tickets.values() if batch.idle >= MANIFEST_LOST_AFTER and not batch.looked]
        for closed in unseen:
            closed.looked = True
        return [closed.manifest for closed in unseen]


class TicketStatistics(BaseModel):
    """Statistics of a ticket's tasks, for the selectors."""

    ticket: str
    stats: dict[str, list[TaskStats]]
    """Statistics by taskset name."""


class ExplorerState(BaseModel):
    """The state from which an explorer process resumes the work of an earlier process."""

    run_id: str = ""
    """Id of the run; empty in a fresh state, and in a state that an older release saved."""
    ready_offset: int = 0
    """Offset of the ready stream at which the run begins."""
    left_over: int = 0
    """Number of messages of earlier runs with this name that were on the broker when the run began."""
    incarnations: int = 0
    taskset: dict[str, Any] | None = None
    """Position in the taskset: identity, epoch, seed and cursor."""
    results_offset: int | None = None
    opened: int = 0
    """Number of training batches opened."""
    closed: int = 0
    """Number of training batches closed."""
    tickets: dict[str, Ticket] = Field(default_factory=dict)
    following: InFlightBatches = Field(default_factory=InFlightBatches)
    broken: list[SubmittedTask] = Field(default_factory=list)
    """Submitted tasks of abandoned batches whose submitters are not answered yet."""
    pending: list[PendingTask] = Field(default_factory=list)
    given_back: dict[str, list[int]] = Field(default_factory=dict)
    """Ids of previously requeued tasks, by open ticket."""
    refill_debt: int = 0
    """Number of groups that operators dropped and that no batch has replaced yet."""
    refilled: dict[str, int] = Field(default_factory=dict)
    """Number of extra tasks that replace dropped groups, by open ticket."""
    left_over_tasks: int = 0
    """Number of requeued tasks that no batch takes, because the last batch has been opened."""
    submitted: int = 0
    """Number of accepted submissions."""
    accepted: list[str] = Field(default_factory=list)
    """Ids of submissions accepted since the last save; the file keeps the ids of the whole run."""
    observations: list[TicketStatistics] = Field(default_factory=list)
    """Observations passed to selectors since the last save; after loading, all observations of the run. The file keeps
    all observations."""
    due: list[int] = Field(default_factory=list)
    """Labels of due evaluations: the number of closed batches at which each evaluation became due, in mode ``bench``
    the label of a checkpoint.
    """
    evaluated: list[str] = Field(default_factory=list)
    """Completed evaluations of the latest label, as batch ids such as ``"50/heldout"``; in mode ``bench`` of all
    labels."""
    benchmarked: dict[str, str] = Field(default_factory=dict)
    """Mode ``bench``: checksum of the weights whose evaluation was begun last, by checkpoint label."""
    dropped_dead: int = 0
    """Number of dead letters that the broker dropped because their queue was full."""
    consecutive_empty: int = 0
    """Number of batches in a row without anything to train on."""
    ended: bool = False
    """True once no more batches will be opened."""
    finished: bool = False
    """True once the run is over: the last evaluation is done, and submitted tasks have been answered."""

    def mark_gateways(self, sessions: str) -> None:
        """Mark the tasks that the run's gateway submitted, in a state of an older release.

        These tasks send their outcomes to the stream ``sessions``, which this release accepts only from the gateway.
        """
        promises = [promise for batch in self.following.tickets.values() for promise in batch.promises]
        refs: list[SubmissionRef | None] = [promise.submission for promise in (*promises, *self.broken)]
        refs += [task.submission for task in self.pending]
        refs += [submission for ticket in self.tickets.values() for submission in ticket.submissions]
        for ref in refs:
            if ref is not None and ref.reply_to == sessions:
                ref.by_gateway = True


class _Changes(NamedTuple):
    core: Mapping[str, Any]
    parts: list[tuple[str, Any]]
    """New rows as (name, content); the content of a row never changes."""
    gone: list[str]
    """Owners whose rows are deleted, such as ``pending/7``."""
    accepted: list[str]
    observations: list[TicketStatistics]
    rows: dict[str, int]
    """Number of written rows by owner, after the write."""
    numbers: dict[int, tuple[int, PendingTask]]
    """Row number and task by ``id()`` of a pending task, after the write."""


class StateFile:
    """Reads and writes the state; a save writes the changes since the last save, in one transaction.

    Immutable parts have their own rows: the tasks of a ticket, each result, a manifest, a pending task. The row
    ``core`` holds the remaining small fields and refers to the other rows. Only a single write runs at a time; it
    serves all saves that were requested before it began.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._requested_saves = self._served_saves = 0
        """Number of requested saves, and number of these saves that finished writes have served."""
        self._last_mark: bytes | None = None
        """Mark of the last write that this process made or loaded; None without a file."""
        self._rows: dict[str, int] = {}
        """Number of written rows of each ticket and each followed batch."""
        self._numbers: dict[int, tuple[int, PendingTask]] = {}
        """Row number and task by ``id()`` of a pending task; the reference to the task keeps its ``id()`` unique."""
        self._next_numbers = itertools.count()
        """Row numbers for further pending tasks."""

    @classmethod
    def of(cls, run_folder: Path) -> StateFile:
        """Return the file of a run."""
        return cls(run_folder / "state" / "explorer.db")

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return self._path.parents[1]

    # -- reading the file

    def load(self) -> ExplorerState:
        """Return the saved state, or a fresh state if the file does not exist.

        Raises:
            FatalError: The file exists but cannot be used; a fresh state would repeat the run's work.
            NewerStateError: A newer release wrote the file.
        """
        if not self._path.exists():
            self._last_mark = None
            return ExplorerState()
        try:
            with self._database() as database:
                check_readable_format(self._path, _format(database), NEWEST_FORMAT)
                bodies: dict[str, bytes] = dict(database.execute("SELECT name, body FROM part"))
                observed = _observations(database)
            self._last_mark = bodies.pop("writer")
            return self._assemble(bodies, observed)
        except (
            OSError,
            sqlite3.Error,
            LookupError,
            TypeError,
            ValueError,
            ValidationError,
            msgpack.UnpackException,
        ) as error:
            raise FatalError(
                f"{self._path}: the explorer's state does not decode ({' '.join(str(error).split())[:200]}). Restore "
                "the file, or start over with `trinity-mq run CONFIG --fresh`"
            ) from error

    def _assemble(self, bodies: dict[str, bytes], observed: list[dict[str, Any]]) -> ExplorerState:
        fields = _unpack(bodies.pop("core"))
        rows: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, body in bodies.items():
            kind, key, part = name.split("/", 2)
            rows[f"{kind}/{key}"][part] = _unpack(body)
        tickets = {key: _ticket_fields(rows[f"ticket/{key}"], core) for key, core in fields["tickets"].items()}
        following = {key: {**rows[f"following/{key}"]["batch"], **core} for key, core in fields["following"].items()}
        numbers = fields["pending"]
        pending = [rows[f"pending/{number}"]["task"] for number in numbers]
        fields |= {"tickets": tickets, "following": {"tickets": following}, "pending": pending}
        fields["observations"] = observed
        state = ExplorerState.model_validate(fields)
        self._rows = {owner: len(parts) for owner, parts in rows.items() if not owner.startswith("pending/")}
        self._numbers = {id(task): (number, task) for number, task in zip(numbers, state.pending, strict=True)}
        self._next_numbers = itertools.count(max(numbers, default=-1) + 1)
        return state

    async def known(self, submissions: Collection[str]) -> set[str]:
        """Return the ids among ``submissions`` that were accepted before, at any time in the run."""
        async with self._lock:
            return await asyncio.to_thread(self._accepted_among, submissions)

    def _accepted_among(self, submissions: Collection[str]) -> set[str]:
        if not self._path.exists():
            return set()
        places = ",".join("?" * len(submissions))
        with self._database() as database:
            rows = database.execute(f"SELECT id FROM submission WHERE id IN ({places})", tuple(submissions))
            return {name for (name,) in rows}

    # -- writing the file

    async def save(self, state: ExplorerState) -> None:
        """Write the current ``state``, which is on disk on return.

        Raises:
            RestartRequested: Another explorer, which had the lock while this explorer was disconnected, has written the
                file.
            OSError: The file cannot be written.
        """
        self._requested_saves += 1
        mine = self._requested_saves
        async with self._lock:
            if self._served_saves >= mine:
                return
            asked, changes = self._requested_saves, self._changes(state)
            writing = asyncio.create_task(asyncio.to_thread(self._write, changes))
            try:
                await asyncio.shield(writing)
            finally:
                while not writing.done():  # if the caller is cancelled, even twice, the next write must still wait
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([writing])
                if not writing.cancelled() and writing.exception() is None:
                    self._count_as_written(state, changes)
            self._served_saves = asked

    async def check(self) -> None:
        """Check that no other process has written the file since this process last read or wrote it.

        Raises:
            RestartRequested: Another explorer has written the file.
        """
        async with self._lock:
            await asyncio.to_thread(self._check)

    def _changes(self, state: ExplorerState) -> _Changes:
        """Return the changes since the last successful write."""
        core: dict[str, Any] = state.model_dump(mode="python", exclude=IN_ROWS_OF_THEIR_OWN)
        parts: list[tuple[str, Any]] = []
        before, rows = dict(self._rows), dict[str, int]()

        def keep(owner: str, new: Iterator[tuple[str, Any]]) -> None:
            added = [(f"{owner}/{name}", content) for name, content in new]
            parts.extend(added)
            rows[owner] = before.pop(owner, 0) + len(added)

        core["tickets"] = {key: ticket.model_dump(exclude=TICKET_ROWS) for key, ticket in state.tickets.items()}
        for key, ticket in state.tickets.items():
            keep(f"ticket/{key}", _ticket_parts(ticket, before.get(f"ticket/{key}", 0)))
        followed = state.following.tickets
        core["following"] = {key: batch.model_dump(exclude=FOLLOWING_ROWS) for key, batch in followed.items()}
        for key, batch in followed.items():
            owner = f"following/{key}"
            keep(owner, iter(() if owner in before else (("batch", batch),)))
        numbers_before = self._numbers
        numbers = {id(task): numbers_before.get(id(task)) or (next(self._next_numbers), task) for task in state.pending}
        core["pending"] = [numbers[id(task)][0] for task in state.pending]
        parts += [(f"pending/{n}/task", task) for key, (n, task) in numbers.items() if key not in numbers_before]
        removed = [f"pending/{n}" for key, (n, _) in numbers_before.items() if key not in numbers]
        accepted, observations = list(state.accepted), list(state.observations)
        return _Changes(core, parts, [*before, *removed], accepted, observations, rows, numbers)

    def _count_as_written(self, state: ExplorerState, changes: _Changes) -> None:
        """Count the changes of a successful write as written. After a failed write, the next write repeats them."""
        self._rows, self._numbers = changes.rows, changes.numbers
        state.accepted = state.accepted[len(changes.accepted) :]
        state.observations = state.observations[len(changes.observations) :]

    def _write(self, changes: _Changes) -> None:
        rows = [("core", msgpack.packb(changes.core)), *((name, _pack(content)) for name, content in changes.parts)]
        mark = uuid.uuid4().bytes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._database() as database:
            # This mode is as durable as creating and deleting the journal each time, but needs no sync of the folder:
            # a write takes 1 ms instead of 12 ms.
            database.execute("PRAGMA journal_mode = PERSIST")
            database.executescript(SCHEMA)
            database.execute("BEGIN IMMEDIATE")
            self._compare(database)
            if not _format(database):
                database.execute(f"PRAGMA user_version = {NEWEST_FORMAT}")
            for owner in changes.gone:  # "0" is the next character after "/"
                database.execute("DELETE FROM part WHERE name > ? AND name < ?", (f"{owner}/", f"{owner}0"))
            database.executemany("INSERT OR REPLACE INTO part VALUES (?, ?)", [*rows, ("writer", mark)])
            accepted = [(name,) for name in changes.accepted]
            database.executemany("INSERT OR IGNORE INTO submission VALUES (?)", accepted)
            observed = [(observation.ticket, msgpack.packb(observation.stats)) for observation in changes.observations]
            database.executemany("INSERT OR IGNORE INTO observation (ticket, body) VALUES (?, ?)", observed)
            database.execute("COMMIT")
        self._last_mark = mark

    def _check(self) -> None:
        if not self._path.exists():
            if self._last_mark is not None:
                raise _taken_over(self._path)
            return
        with self._database() as database:
            self._compare(database)

    def _compare(self, database: sqlite3.Connection) -> None:
        row = database.execute("SELECT body FROM part WHERE name = 'writer'").fetchone()
        if (row and row[0]) != self._last_mark:
            raise _taken_over(self._path)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open the database; closing it rolls back an uncommitted transaction.

        Raises:
            OSError: The database cannot be used.
        """
        try:
            with closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS, isolation_level=None)) as database:
                yield database
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if "full" in str(error) else errno.EIO
            raise OSError(code, f"the explorer's state cannot be used: {error}", str(self._path)) from error


def _format(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _observations(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return all observations in order; files of earlier releases have no table of observations."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'observation'").fetchone() is None:
        return []
    rows = database.execute("SELECT ticket, body FROM observation ORDER BY number")
    return [{"ticket": ticket, "stats": _unpack(body)} for ticket, body in rows]


def _taken_over(path: Path) -> RestartRequested:
    return RestartRequested(f"{path}: another explorer has resumed this run; this explorer restarts from its state")


def _ticket_parts(ticket: Ticket, written: int) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a ticket after the first ``written`` rows: tasks, results in order of arrival, manifest."""
    if not written:
        yield "tasks", ticket
    for task_slice in ticket.decisions[max(0, written - 1) :]:
        yield f"result/{task_slice.task_id}/{task_slice.run_base}", task_slice.result
    if ticket.manifest is not None and written < len(ticket.decisions) + 2:
        yield "manifest", ticket.manifest


def _ticket_fields(rows: Mapping[str, Any], core: Mapping[str, Any]) -> dict[str, Any]:
    tasks = rows["tasks"]
    slices = [
        {"task_id": task, "run_base": base, "repeat_times": runs, "result": rows.get(f"result/{task}/{base}")}
        for task, base, runs in tasks["slices"]
    ]
    return {**core, **tasks, "slices": slices, "manifest": rows.get("manifest")}


def _pack(content: BaseModel) -> bytes:
    """Encode the content of a row. A ticket is encoded in small steps, so that other threads can run."""
    fields: Any
    if isinstance(content, Ticket):
        fields = {
            "tasks": [task.model_dump() for task in content.tasks],
            "slices": [
                (task_slice.task_id, task_slice.run_base, task_slice.repeat_times) for task_slice in content.slices
            ],
            "submissions": [submission.model_dump() for submission in content.submissions],
        }
    elif isinstance(content, InFlightBatch):
        fields = content.model_dump(include=FOLLOWING_ROWS)
    else:
        fields = content.model_dump()
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False)
