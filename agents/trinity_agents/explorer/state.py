"""The explorer's saved state, and the database file that it is kept in."""

from __future__ import annotations

import asyncio
import errno
import itertools
import sqlite3
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from pydantic import BaseModel, Field, ValidationError

from trinity_agents.explorer.in_flight import InFlightBatch, InFlightBatches, PendingTask, SubmittedTask
from trinity_mq.data import TaskStats
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.state_formats import refuse_newer


class Observation(BaseModel):
    """Statistics of the tasks of a ticket, for the selectors."""

    ticket: str
    stats: dict[str, list[TaskStats]]
    """By taskset."""


class ExplorerState(BaseModel):
    """The state with which an explorer goes on where another was killed."""

    run_id: str = ""
    """Identity of the run; empty: of a fresh state, and of one that an older release saved."""
    ready_offset: int = 0
    """Offset of the ready stream at which the run begins."""
    left_over: int = 0
    """Messages of earlier runs of this name that were on the broker when the run began."""
    incarnations: int = 0
    taskset: dict[str, Any] | None = None
    """Identity, epoch, seed, cursor."""
    results_offset: int | None = None
    opened: int = 0
    """Training batches opened."""
    closed: int = 0
    """Training batches closed."""
    tickets: dict[str, Ticket] = Field(default_factory=dict)
    following: InFlightBatches = Field(default_factory=InFlightBatches)
    broken: list[SubmittedTask] = Field(default_factory=list)
    """Submitted tasks of abandoned batches whose submitters are still to be answered."""
    pending: list[PendingTask] = Field(default_factory=list)
    given_back: dict[str, list[int]] = Field(default_factory=dict)
    """By open ticket: the tasks in it that were given back before."""
    refill_debt: int = 0
    """Groups that operators dropped and no batch has replaced yet."""
    refilled: dict[str, int] = Field(default_factory=dict)
    """By open ticket: its tasks that take the place of such groups."""
    left_over_tasks: int = 0
    """Tasks that were given back after the last batch was opened: no batch takes them."""
    submitted: int = 0
    """Submissions accepted."""
    accepted: list[str] = Field(default_factory=list)
    """Ids of submissions accepted since the last save; the file keeps those of the whole run."""
    observations: list[Observation] = Field(default_factory=list)
    """Observations told to selectors since the last save; as loaded, all of the run. The file keeps them."""
    due: list[int] = Field(default_factory=list)
    """Evaluations to do, by the number of closed batches at which each was due."""
    evaluated: list[str] = Field(default_factory=list)
    """Evaluations done under the latest label, as batch ids such as ``"50/heldout"``; in mode ``bench`` all."""
    benchmarked: dict[str, str] = Field(default_factory=dict)
    """Mode ``bench``: checksum of the weights that were evaluated last, by the checkpoint's label."""
    dropped_dead: int = 0
    """Dead letters that the broker dropped because their queue was full."""
    consecutive_empty: int = 0
    ended: bool = False
    """No more batches will be opened."""
    finished: bool = False
    """The last evaluation is done."""

    def mark_gateways(self, sessions: str) -> None:
        """Mark the tasks of the run's gateway in a state that an older release saved: their outcomes go to the stream
        ``sessions``, which no task of a submitter that was accepted by this release names.
        """
        promises = [one for batch in self.following.tickets.values() for one in batch.promises]
        refs: list[SubmissionRef | None] = [one.submission for one in (*promises, *self.broken)]
        refs += [one.submission for one in self.pending]
        refs += [one for ticket in self.tickets.values() for one in ticket.submissions]
        for ref in refs:
            if ref is not None and ref.reply_to == sessions:
                ref.by_gateway = True


NEWEST_FORMAT = 1
"""Format that this release writes and the newest that it reads: the database's ``user_version``. Release 0.1.0 left it
at 0, which is format 1 too."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS part (name TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS submission (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS observation (number INTEGER PRIMARY KEY, ticket TEXT UNIQUE NOT NULL, body BLOB NOT NULL);
"""
IN_ROWS_OF_THEIR_OWN = {"tickets", "following", "pending", "accepted", "observations"}
"""Fields of the state that are not in the row ``core``."""
TICKET_ROWS = {"tasks", "slices", "submissions", "manifest"}
FOLLOWING_ROWS = {"manifest", "promises", "tasks"}
LOCK_SECONDS = 30.0
"""Seconds for which a save waits for another process that has the file open."""


class _Changes(NamedTuple):
    core: Mapping[str, Any]
    parts: list[tuple[str, Any]]
    """New rows: name and content, which does not change any more."""
    gone: list[str]
    """Owners that have no rows any more, such as ``pending/7``."""
    accepted: list[str]
    observations: list[Observation]


class StateFile:
    """Reads and writes the state; a save writes what changed since the last one, in one transaction.

    What never changes once it is there has a row of its own: the tasks of a ticket, each result, a manifest, a pending
    task. The row ``core`` holds the rest, which is small, and names the others. One write is under way at a time, and
    serves all who asked for one before it began.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._asked = self._written = 0
        """Saves asked for, and those that a finished write serves."""
        self._known: bytes | None = None
        """Mark of the last write, ours or one that was read; None: there was none."""
        self._rows: dict[str, int] = {}
        """Number of rows by ticket and followed batch."""
        self._numbers: dict[int, tuple[int, PendingTask]] = {}
        """By identity of a pending task: its number, and the task, which keeps the identity its own."""
        self._unused = itertools.count()
        """Numbers of further pending tasks."""

    @classmethod
    def of(cls, run_folder: Path) -> StateFile:
        """Return the file of a run."""
        return cls(run_folder / "state" / "explorer.db")

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return self._path.parents[1]

    # -- reading

    def load(self) -> ExplorerState:
        """Return the saved state, a fresh one when there is none.

        Raises:
            FatalError: The file is there but cannot be used; starting from nothing would do the run's work again.
            NewerStateError: A newer release wrote it.
        """
        if not self._path.exists():
            self._known = None
            return ExplorerState()
        try:
            with self._database() as database:
                refuse_newer(self._path, _format(database), NEWEST_FORMAT)
                found: dict[str, bytes] = dict(database.execute("SELECT name, body FROM part"))
                observed = _observations(database)
            self._known = found.pop("writer")
            return self._assembled(found, observed)
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
                "the file, or train anew with `trinity-mq run CONFIG --fresh`"
            ) from error

    def _assembled(self, found: dict[str, bytes], observed: list[dict[str, Any]]) -> ExplorerState:
        fields = _unpack(found.pop("core"))
        rows: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, body in found.items():
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
        self._numbers = {id(one): (number, one) for number, one in zip(numbers, state.pending, strict=True)}
        self._unused = itertools.count(max(numbers, default=-1) + 1)
        return state

    async def known(self, submissions: Collection[str]) -> set[str]:
        """Return which of these submissions were accepted before, however long ago."""
        async with self._lock:
            return await asyncio.to_thread(self._known_of, submissions)

    def _known_of(self, submissions: Collection[str]) -> set[str]:
        if not self._path.exists():
            return set()
        places = ",".join("?" * len(submissions))
        with self._database() as database:
            found = database.execute(f"SELECT id FROM submission WHERE id IN ({places})", tuple(submissions))
            return {name for (name,) in found}

    # -- writing

    async def save(self, state: ExplorerState) -> None:
        """Write ``state`` as it is now; on return it is on disk.

        Raises:
            RestartMe: Another explorer wrote the file since: it had the lock while this one was disconnected.
            OSError: It cannot be written.
        """
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._written >= mine:
                return
            asked, changes = self._asked, self._changes(state)
            writing = asyncio.create_task(asyncio.to_thread(self._write, changes))
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait([writing])  # a caller that is cancelled does not let the next write overtake it
            self._written = asked

    async def check(self) -> None:
        """Return if nobody else wrote the file since it was last read or written.

        Raises:
            RestartMe: As :meth:`save`.
        """
        async with self._lock:
            await asyncio.to_thread(self._check)

    def _changes(self, state: ExplorerState) -> _Changes:
        """Return what the next write has to write, and count it as written."""
        core: dict[str, Any] = state.model_dump(mode="python", exclude=IN_ROWS_OF_THEIR_OWN)
        parts: list[tuple[str, Any]] = []
        before, self._rows = self._rows, {}

        def keep(owner: str, new: Iterator[tuple[str, Any]]) -> None:
            added = [(f"{owner}/{name}", content) for name, content in new]
            parts.extend(added)
            self._rows[owner] = before.pop(owner, 0) + len(added)

        core["tickets"] = {key: one.model_dump(exclude=TICKET_ROWS) for key, one in state.tickets.items()}
        for key, ticket in state.tickets.items():
            keep(f"ticket/{key}", _ticket_parts(ticket, before.get(f"ticket/{key}", 0)))
        followed = state.following.tickets
        core["following"] = {key: one.model_dump(exclude=FOLLOWING_ROWS) for key, one in followed.items()}
        for key, batch in followed.items():
            owner = f"following/{key}"
            keep(owner, iter(() if owner in before else (("batch", batch),)))
        known = self._numbers
        self._numbers = {id(one): known.get(id(one)) or (next(self._unused), one) for one in state.pending}
        core["pending"] = [self._numbers[id(one)][0] for one in state.pending]
        parts += [(f"pending/{n}/task", one) for key, (n, one) in self._numbers.items() if key not in known]
        gone = [f"pending/{n}" for key, (n, _) in known.items() if key not in self._numbers]
        accepted, state.accepted = state.accepted, []
        observations, state.observations = state.observations, []
        return _Changes(core, parts, [*before, *gone], accepted, observations)

    def _write(self, changes: _Changes) -> None:
        rows = [("core", msgpack.packb(changes.core)), *((name, _pack(content)) for name, content in changes.parts)]
        mark = uuid.uuid4().bytes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._database() as database:
            # as durable as a journal that is made and deleted each time, without waiting for its folder: 1 ms, not 12
            database.execute("PRAGMA journal_mode = PERSIST")
            database.executescript(SCHEMA)
            database.execute("BEGIN IMMEDIATE")
            self._compare(database)
            if not _format(database):
                database.execute(f"PRAGMA user_version = {NEWEST_FORMAT}")
            for owner in changes.gone:  # "0" is the character behind "/"
                database.execute("DELETE FROM part WHERE name > ? AND name < ?", (f"{owner}/", f"{owner}0"))
            database.executemany("INSERT OR REPLACE INTO part VALUES (?, ?)", [*rows, ("writer", mark)])
            accepted = [(name,) for name in changes.accepted]
            database.executemany("INSERT OR IGNORE INTO submission VALUES (?)", accepted)
            observed = [(one.ticket, msgpack.packb(one.stats)) for one in changes.observations]
            database.executemany("INSERT OR IGNORE INTO observation (ticket, body) VALUES (?, ?)", observed)
            database.execute("COMMIT")
        self._known = mark

    def _check(self) -> None:
        if not self._path.exists():
            if self._known is not None:
                raise _taken_over(self._path)
            return
        with self._database() as database:
            self._compare(database)

    def _compare(self, database: sqlite3.Connection) -> None:
        found = database.execute("SELECT body FROM part WHERE name = 'writer'").fetchone()
        if (found and found[0]) != self._known:
            raise _taken_over(self._path)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open the database; closing it undoes what was not committed. Raises OSError."""
        try:
            with closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS, isolation_level=None)) as database:
                yield database
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if "full" in str(error) else errno.EIO
            raise OSError(code, f"the explorer's state cannot be used: {error}", str(self._path)) from error


def _format(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _observations(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return what selectors were told, in order; files of earlier releases have no such table."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'observation'").fetchone() is None:
        return []
    rows = database.execute("SELECT ticket, body FROM observation ORDER BY number")
    return [{"ticket": ticket, "stats": _unpack(body)} for ticket, body in rows]


def _taken_over(path: Path) -> RestartMe:
    return RestartMe(f"{path}: another explorer has gone on with this run; this one starts anew from there")


def _ticket_parts(ticket: Ticket, written: int) -> Iterator[tuple[str, Any]]:
    """Return the rows of a ticket behind the first ``written``: its tasks, its results as they came, its manifest."""
    if not written:
        yield "tasks", ticket
    for one in ticket.decisions[max(0, written - 1) :]:
        yield f"result/{one.task_id}/{one.run_base}", one.result
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
    """Encode the content of a row; in small steps, so that other threads run meanwhile."""
    fields: Any
    if isinstance(content, Ticket):
        fields = {
            "tasks": [task.model_dump() for task in content.tasks],
            "slices": [(one.task_id, one.run_base, one.repeat_times) for one in content.slices],
            "submissions": [one.model_dump() for one in content.submissions],
        }
    elif isinstance(content, InFlightBatch):
        fields = content.model_dump(include=FOLLOWING_ROWS)
    else:
        fields = content.model_dump()
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False)
