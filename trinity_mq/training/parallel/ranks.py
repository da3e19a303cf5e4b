"""The ranks of a trainer: processes that share its train steps. Rank 0 leads the others, and is the only rank that
connects to the broker.

Rank 0 announces each command on a TCPStore, under its number, and only then enters the collectives of the command. The
other ranks wait for the next number in the store. So no rank waits in a collective that has not begun, however long
rank 0 has no batch, and each collective has a deadline.

Each command ends with a vote on the store. A command that failed on one rank counts as failed on all ranks, so no rank
continues with a state that another rank lacks.

Ranks are started by ``torchrun``, or by rank 0 itself (:class:`RankProcesses`). If one rank ends, all ranks end: a
collective with it fails at once, and without rank 0 the store is lost. The trainer then restarts from its checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_mq.runtime.errors import DeviceMemoryError, FatalError, RestartRequested
from trinity_mq.runtime.process import die_with_parent

PARENT_VARIABLE = "TRINITY_MQ_RANK_PARENT"
"""Environment variable with the process id of rank 0, set if rank 0 itself started this rank."""
OPENING = timedelta(seconds=120)
"""Deadline for the processes to find each other; it includes the import of torch."""
POLL = timedelta(seconds=5)
"""Interval at which a rank that waits for a command checks that rank 0 still exists."""
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in the processes that it starts."""
KEPT = 8
"""Number of latest commands, with their votes, that stay in the store. No rank lags further, because each command has a
vote.
"""
VOTE_GRACE = 10.0
"""Seconds that a failed rank waits for the votes of the others. A rank without a vote by then is assumed to wait in a
collective, which ends when the failed rank ends.
"""
REASON_LENGTH = 2000
"""Maximum length of the reason in a vote, in characters."""

T = TypeVar("T")


class RankError(RestartRequested):
    """Another rank is gone or took longer than allowed. All ranks restart."""


class FailedElsewhereError(FatalError):
    """A command failed on another rank, which is still usable.

    Args:
        text: Names the rank and the reason.
        error: Class name of the error on that rank.
    """

    def __init__(self, text: str, error: str) -> None:
        super().__init__(text)
        self.error = error


@dataclass(frozen=True, slots=True)
class Vote:
    """Outcome of a command on a rank."""

    kind: Literal["done", "failed", "broken"] = "done"
    """``failed``: the command failed, but the rank is usable. ``broken``: the rank ends."""
    error: str = ""
    """Class name of the error."""
    reason: str = ""

    @classmethod
    def of(cls, error: Exception) -> Vote:
        """Return the vote of a rank on which ``error`` ended the command."""
        is_usable = isinstance(error, FatalError) and not isinstance(error, DeviceMemoryError)
        kind: Literal["failed", "broken"] = "failed" if is_usable else "broken"
        return cls(kind, type(error).__name__, str(error) or repr(error))

    def error_elsewhere(self, text: str) -> FatalError | RestartRequested:
        """Return the error of the other ranks, with a text that contains the reason, if this vote is not ``done``."""
        if self.kind == "failed":
            return FailedElsewhereError(text, self.error)
        return DeviceMemoryError(text) if self.error == DeviceMemoryError.__name__ else RankError(text)


_SEVERITY = ("done", "failed", "broken")


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A command that rank 0 has announced."""

    name: str
    arguments: dict[str, Any]
    """Small values: numbers, texts and lists of them."""
    body: bytes = b""
    """Large data, sent by a broadcast."""


def is_started_by_torchrun() -> bool:
    """Return whether torchrun has started this process, and therefore all ranks."""
    return TORCHRUN_VARIABLE in os.environ


def _is_rank_process() -> bool:
    """Return whether the environment describes a rank of a trainer."""
    return is_started_by_torchrun() or PARENT_VARIABLE in os.environ


def own_rank() -> int:
    """Return this process's rank. ``RANK`` counts only if torchrun or rank 0 has set it, because clusters also set it
    for other kinds of jobs.
    """
    return int(os.environ["RANK"]) if _is_rank_process() else 0


def own_device(alone: int) -> int:
    """Return the index of this rank's device on its machine; ``alone`` for a process without other ranks."""
    return int(os.environ["LOCAL_RANK"]) if _is_rank_process() else alone


def ranks_on_machine(world: int) -> int:
    """Return how many of the ``world`` ranks run on this machine. Each of them needs its own device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) if is_started_by_torchrun() else world


def world_size(nproc: int) -> int:
    """Return the number of the trainer's ranks: the number that torchrun has started, else ``trainer.nproc``."""
    return int(os.environ["WORLD_SIZE"]) if is_started_by_torchrun() else nproc


class Ranks:
    """One rank's view of all ranks. A single rank waits for no other rank, and its sums are its own values.

    Not thread-safe: commands and collectives must occur in the same order on all ranks.
    """

    def __init__(self, rank: int = 0, world: int = 1, seconds: float = 600.0) -> None:
        """Create the view without a connection; see :meth:`connect_store` and :meth:`open`.

        Args:
            rank: Rank of this process.
            world: Number of ranks.
            seconds: Deadline of a collective in seconds.
        """
        self.rank, self.world = rank, world
        self.lost = ""
        """Reason why the ranks will never be complete; empty while no rank is known to be lost."""
        self._timeout = timedelta(seconds=seconds)
        self._store: Store | None = None
        self._address: tuple[str, int] | None = None
        self._number = self._openings = 0

    @property
    def number(self) -> int:
        """Number of the latest command, the same on all ranks while they run it."""
        return self._number

    @property
    def seconds(self) -> float:
        """Deadline of a collective in seconds."""
        return self._timeout.total_seconds()

    def host(self) -> int:
        """Host the store on this machine, for ranks that rank 0 starts itself; return its port."""
        store = TCPStore("127.0.0.1", 0, None, True, timeout=OPENING, wait_for_workers=False)
        self._store = PrefixStore("ranks/0", store)
        self._address = "127.0.0.1", int(store.port)
        return int(store.port)

    def connect_store(self) -> None:
        """Connect to the store, which rank 0 or torchrun hosts. The other ranks need not be connected yet.

        Raises:
            RankError: The store was not found in time.
        """
        if self.world == 1 or self._store is not None:
            return
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = self._connected(_prefix(), is_host=self.rank == 0 and not hosted)

    def mailbox(self) -> Mailbox:
        """Return another connection to the store, for another thread. Its thread does not wait for commands, and no
        command waits for it.

        Raises:
            RankError: The store was not found in time.
        """
        return Mailbox(self, self._connected(f"{_prefix()}/mail"))

    def _connected(self, prefix: str, *, is_host: bool = False) -> Store:
        assert self._address is not None, "connect_store() comes first"
        host, port = self._address
        try:
            store = TCPStore(host, port, None, is_host, timeout=OPENING, wait_for_workers=False)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} found no store at {host}:{port}: {error}") from error
        return PrefixStore(prefix, store)

    def open(self, device: torch.device) -> None:
        """Create the process group, and make ``device`` the current device of this thread, which must be the thread
        that computes: torch keeps a current device per thread, and FSDP and device meshes take the current device. This
        is a collective of all ranks. Later calls only set the device. A single rank does nothing.

        Args:
            device: Device of this rank's models. Tensors to sum may be on it too.

        Raises:
            RankError: A rank did not join in time.
        """
        if self.world == 1:
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return
        assert self._store is not None, "connect_store() comes first"
        self._openings += 1
        store = PrefixStore(f"group/{self._openings}", self._store)  # hides keys of earlier groups
        self._wait_for_all(store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world,
                timeout=self._timeout,
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            raise RankError(f"the {self.world} ranks did not form a process group: {error}") from error

    def _wait_for_all(self, store: Store) -> None:
        """Wait until every rank is about to create the group, without a collective."""
        here = [f"here/{rank}" for rank in range(self.world)]
        store.set(here[self.rank], "1")
        ends = time.monotonic() + OPENING.total_seconds()
        while True:
            try:
                store.wait(here, timedelta(seconds=1))
                return
            except dist.DistStoreError as error:
                missing = [rank for rank, key in enumerate(here) if not store.check([key])]
                if self.lost or time.monotonic() > ends:
                    why = self.lost or f"ranks {missing} did not join within {OPENING.total_seconds():g} s"
                    raise RankError(f"the {self.world} ranks did not form a process group: {why}") from error
            except RuntimeError as error:
                raise RankError(f"the store of the ranks is gone, and rank 0 with it: {error}") from error

    def announce(self, command: str, body: bytes = b"", **arguments: Any) -> None:
        """Announce the next command to the other ranks; rank 0 only.

        Args:
            command: Name of the command.
            body: Large data for the command.
            arguments: Small values.

        Raises:
            RankError: Another rank is gone.
        """
        if self.world == 1:
            return
        assert self._store is not None
        self._number += 1
        try:
            self._store.set(f"command/{self._number}", msgpack.packb([command, arguments, len(body)]))
            if self._number > KEPT:
                self._store.delete_key(f"command/{self._number - KEPT}")
        except RuntimeError as error:
            raise RankError(f"command {command!r} could not be announced: {error}") from error
        if body:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def next(self, patience: float = math.inf) -> RankCommand:
        """Wait for the next command as long as rank 0 lives; for ranks above 0.

        Args:
            patience: Maximum wait in seconds.

        Raises:
            RankError: Rank 0 is gone, or announced nothing in time.
        """
        ends = time.monotonic() + patience
        assert self._store is not None, "connect_store() comes first"
        key = f"command/{self._number + 1}"
        while True:
            try:
                self._store.wait([key], POLL)
                name, arguments, size = msgpack.unpackb(self._store.get(key))
                break
            except dist.DistStoreError as error:
                if time.monotonic() > ends:
                    raise RankError(f"rank 0 announced nothing for {patience:g} s") from error
            except RuntimeError as error:
                raise RankError(f"rank 0 is gone: {error}") from error
        self._number += 1
        body = b""
        if size:
            flat = torch.empty(size, dtype=torch.uint8)
            self._broadcast(flat)
            body = flat.numpy().tobytes()
        return RankCommand(name, arguments, body)

    @contextmanager
    def command(self, name: str, body: bytes = b"", **arguments: Any) -> Iterator[None]:
        """Announce a command, run rank 0's part of it in the ``with`` block, and vote; see :meth:`voting`."""
        self.announce(name, body, **arguments)
        with self.voting(name):
            yield

    @contextmanager
    def voting(self, what: str) -> Iterator[None]:
        """Run a rank's part of the command ``what`` in the ``with`` block. The command has the same outcome on all
        ranks.

        Raises:
            FailedElsewhereError: The command failed on another rank. A rank's own error is raised unchanged.
            DeviceMemoryError: The device of another rank has too little memory, and no restart helps.
            RankError: Another rank is no longer usable, or did not vote.
        """
        if self.world == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            self._fail(what, error)
            raise
        worst, rank = self._worst(self._votes(what, self._timeout.total_seconds(), Vote()))
        text = f"{what!r} failed on rank {rank} of {self.world}: {worst.reason}"
        if worst.kind != "done":
            raise worst.error_elsewhere(text)

    def _fail(self, what: str, error: Exception) -> None:
        """Vote with an error. Return if this rank is to raise its own error: it is broken itself, or no rank is broken.

        Raises:
            RankError: A rank is no longer usable.
        """
        vote = Vote.of(error)
        try:
            worst, rank = self._worst(self._votes(what, self._patience(what, vote), vote))
        except RankError:
            if vote.kind == "broken":
                return  # the cause is more useful than the loss of the other ranks
            raise
        if worst.kind == "broken" != vote.kind:
            raise RankError(f"{what!r} failed on rank {rank} of {self.world}: {worst.reason}") from error

    def _patience(self, what: str, vote: Vote) -> float:
        """Return how many seconds this rank, on which a command has failed, waits for the votes of the others."""
        if vote.kind == "broken" and self.rank == 0:
            return 0.0  # the others end when rank 0 ends
        if vote.kind != "broken" and what == "open":
            return self._timeout.total_seconds()  # the others may still be reading
        return VOTE_GRACE

    @staticmethod
    def _worst(votes: Sequence[Vote]) -> tuple[Vote, int]:
        """Return the most severe vote, and the first rank that cast it."""
        rank = max(range(len(votes)), key=lambda index: _SEVERITY.index(votes[index].kind))
        return votes[rank], rank

    def _votes(self, what: str, patience: float, own_vote: Vote) -> list[Vote]:
        """Cast a vote on the current command and return the votes of all ranks, by rank.

        Raises:
            RankError: A rank did not vote in time, or is gone.
        """
        assert self._store is not None
        keys = [f"vote/{self._number}/{rank}" for rank in range(self.world)]
        ends = time.monotonic() + patience
        try:
            self._store.set(
                keys[self.rank], msgpack.packb([own_vote.kind, own_vote.error, own_vote.reason[:REASON_LENGTH]])
            )
            self._wait_for_votes(what, keys, ends)
            votes = [Vote(*msgpack.unpackb(vote)) for vote in self._store.multi_get(keys)]
            if self._number > KEPT:
                self._store.delete_key(f"vote/{self._number - KEPT}/{self.rank}")
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"the vote on {what!r} failed on rank {self.rank}: {error}") from error
        return votes

    def _wait_for_votes(self, what: str, keys: list[str], ends: float) -> None:
        assert self._store is not None
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=max(0.01, min(1.0, ends - time.monotonic()))))
                return
            except dist.DistStoreError as error:
                if self.lost or time.monotonic() > ends:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    why = self.lost or f"ranks {missing} have not finished"
                    raise RankError(f"the ranks did not end {what!r} together: {why}") from error

    def error_of_lost_rank(self, text: str) -> FatalError | RestartRequested:
        """Return the error with which this rank ends after the loss of another rank: a restart, unless the lost rank
        has reported that no restart helps. Any thread may call it.
        """
        rank, vote = self._first_failure()
        if not vote.reason:
            return RankError(text)
        text = f"{text}; rank {rank} failed first: {vote.reason}"
        return DeviceMemoryError(text) if vote.error == DeviceMemoryError.__name__ else RankError(text)

    def _first_failure(self) -> tuple[int, Vote]:
        """Return the lowest other rank that voted with an error on the current command, and its vote. Without such a
        rank the vote is empty.
        """
        if self._store is None:
            return -1, Vote()
        for rank in (other_rank for other_rank in range(self.world) if other_rank != self.rank):
            key = f"vote/{self._number}/{rank}"
            with suppress(RuntimeError):
                if self._store.check([key]) and (vote := Vote(*msgpack.unpackb(self._store.get(key)))).reason:
                    return rank, vote
        return -1, Vote()

    def _broadcast(self, flat: Tensor) -> None:
        with self.together("broadcast"):
            dist.broadcast(flat, 0)

    def sum(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.world == 1:
            return
        for tensor in tensors:
            with self.together("sum"):
                dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; for small values."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        with self.together("gathering"):
            dist.all_gather_object(values, value)
        return [gathered for gathered in values if gathered is not None]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the work ``what`` in the ``with`` block; other ranks take part in it. Convert torch's error of a
        collective to a :class:`RankError`, or to a :class:`DeviceMemoryError` if another rank has reported one.
        """
        try:
            yield
        except (RankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if self.world == 1:
                raise
            raise self.error_of_lost_rank(
                f"{what} of rank {self.rank} of {self.world} failed: {error}; another rank is gone, or took longer "
                f"than {self._timeout.total_seconds():g} s (trainer.rank_timeout)"
            ) from error

    def close(self) -> None:
        """Destroy the process group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _prefix() -> str:
    """Return the prefix of the ranks' keys. torchrun keeps its store across restarts of the ranks."""
    return f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Mailbox:
    """Messages between the checkpoint writers of the ranks, which work while the ranks run commands. Use it from one
    thread only, except :meth:`close`.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        self._ranks, self._store = ranks, store
        self._is_closed = threading.Event()

    def close(self) -> None:
        """End the wait of another thread in :meth:`receive`."""
        self._is_closed.set()

    def send(self, key: str, message: Any) -> None:
        """Store a message, of types that msgpack has, under a key that was not used before.

        Raises:
            RankError: The store is gone.
        """
        try:
            self._store.set(key, msgpack.packb(message))
        except RuntimeError as error:
            raise RankError(f"rank 0 is gone: {error}") from error

    def remove(self, *keys: str) -> None:
        """Remove messages that everybody has received."""
        for key in keys:
            self._store.delete_key(key)

    def receive(self, key: str, seconds: float = math.inf) -> Any:
        """Wait for a message.

        Raises:
            RankError: The message did not come in ``seconds``, a rank is gone, or :meth:`close` was called.
        """
        ends = time.monotonic() + seconds
        try:
            while True:
                try:
                    self._store.wait([key], timedelta(seconds=max(0.01, min(1.0, ends - time.monotonic()))))
                    return msgpack.unpackb(self._store.get(key))
                except dist.DistStoreError as error:
                    if self._is_closed.is_set() or self._ranks.lost or time.monotonic() > ends:
                        why = self._ranks.lost or f"it did not come within {seconds:g} s"
                        raise RankError(f"the message {key!r} will not come: {why}") from error
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"rank 0 is gone: {error}") from error


class RankProcesses:
    """The ranks above 0 as child processes of rank 0, which starts them with its own command line. Empty if torchrun
    started the ranks.
    """

    def __init__(self, ranks: Ranks, grace: float = 10.0) -> None:
        """Prepare the object; :meth:`start` starts the processes.

        Args:
            ranks: View of rank 0.
            grace: Seconds that the other ranks have to exit after they were told to.
        """
        self._ranks, self._grace = ranks, grace
        self._children: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start the processes; their environment holds the address of the store."""
        if self._ranks.world == 1 or is_started_by_torchrun():
            return
        port = await asyncio.to_thread(self._ranks.host)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT_VARIABLE: str(os.getpid())}
        meeting |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise every poll for a command prints a warning on stderr
        for rank in range(1, self._ranks.world):
            environment = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._children.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, *sys.orig_argv[1:]), env=os.environ | environment, stdin=subprocess.DEVNULL
                )
            )

    async def watch(self) -> None:
        """Wait until a process ends; wait forever without processes.

        Raises:
            RankError: A process ended.
            DeviceMemoryError: A process ended because its device has too little memory.
        """
        if not self._children:
            await asyncio.get_running_loop().create_future()
        waiting = {asyncio.create_task(child.wait()): rank for rank, child in enumerate(self._children, 1)}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        [first, *_] = done
        self._ranks.lost = f"rank {waiting[first]} ended with exit code {first.result()}"
        raise await asyncio.to_thread(self._ranks.error_of_lost_rank, self._ranks.lost)

    async def end(self) -> None:
        """Wait for the processes to exit, and kill the remaining processes after the grace period."""
        try:
            async with asyncio.timeout(self._grace):
                await asyncio.gather(*(child.wait() for child in self._children))
        except TimeoutError:
            for child in self._children:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        self._children.clear()


def begin_follower() -> None:
    """Set up the process of a rank above 0. It ignores SIGINT and SIGTERM and ends with rank 0, which alone decides
    when to end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent), signal.SIGKILL)
