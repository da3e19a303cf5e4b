"""The ranks of a trainer: processes that share its train steps. Rank 0 leads them and alone speaks to the broker.

Rank 0 announces each command on a TCPStore, under its number, and only then enters the collectives that belong to it;
the others wait for the next number there. So nobody waits in a collective that has not begun, however long rank 0 has
no batch, and each collective has a deadline.

Each command ends with a vote on the store: a command that has failed on one rank has failed on all of them, so no rank
continues with a state that another rank lacks.

Ranks are started by ``torchrun``, or by rank 0 itself (:class:`RankProcesses`). One that ends ends them all: a
collective with it fails at once, and a rank without its leader loses the store. The trainer then begins anew from its
checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
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

from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.process import die_with_parent

PARENT_VARIABLE = "TRINITY_MQ_RANK_PARENT"
"""Process id of the rank 0 that started this rank by itself."""
OPENING = timedelta(seconds=120)
"""For the processes to find each other; they import torch meanwhile."""
POLL = timedelta(seconds=5)
"""A rank that waits for a command looks this often whether its leader is still there."""
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in the processes that it starts."""
KEPT = 8
"""Announced commands and their votes that stay in the store: nobody is further behind, for each command has a vote."""
VOTE_GRACE = 10.0
"""Seconds in which a rank that failed waits for the votes of the others. A rank without a vote by then is taken to wait
in a collective; it gets out when the failed rank ends."""
REASON_LENGTH = 2000
"""Most characters of a reason in a vote."""

T = TypeVar("T")


class RankError(RestartMe):
    """Another rank is gone, or took longer than allowed; all ranks begin anew."""


class FailedElsewhereError(FatalError):
    """A command failed on another rank, which is still usable.

    Args:
        text: Says which rank, and why.
        error: Class of the error there.
    """

    def __init__(self, text: str, error: str) -> None:
        super().__init__(text)
        self.error = error


@dataclass(frozen=True, slots=True)
class Vote:
    """End of a command on a rank."""

    kind: Literal["done", "failed", "broken"] = "done"
    """After a failure the rank is usable; a broken rank ends."""
    error: str = ""
    """Class of the error."""
    reason: str = ""

    @classmethod
    def of(cls, error: Exception) -> Vote:
        """Return the vote of a rank on which ``error`` ended the command."""
        kind: Literal["failed", "broken"] = "failed" if isinstance(error, FatalError) else "broken"
        return cls(kind, type(error).__name__, str(error) or repr(error))


_SEVERITY = ("done", "failed", "broken")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that rank 0 has announced."""

    name: str
    arguments: dict[str, Any]
    """Small values: numbers, texts and lists of them."""
    body: bytes = b""
    """Large ones, sent by a broadcast."""


def is_started_by_torchrun() -> bool:
    """Return whether torchrun has started this process, and so all ranks."""
    return TORCHRUN_VARIABLE in os.environ


def _is_told() -> bool:
    """Return whether the environment speaks of ranks of a trainer."""
    return is_started_by_torchrun() or PARENT_VARIABLE in os.environ


def own_rank() -> int:
    """Return this process's rank. ``RANK`` counts only where torchrun or rank 0 has set it: clusters set it, too, for
    jobs that are something else.
    """
    return int(os.environ["RANK"]) if _is_told() else 0


def own_device(alone: int) -> int:
    """Return the number of this rank's device on its machine; ``alone`` for a process that is the only one."""
    return int(os.environ["LOCAL_RANK"]) if _is_told() else alone


def world_size(nproc: int) -> int:
    """Return how many ranks the trainer has: those that torchrun has started, else ``trainer.nproc``."""
    return int(os.environ["WORLD_SIZE"]) if is_started_by_torchrun() else nproc


class Ranks:
    """One rank's view of all of them. A single one has nobody to wait for, and its sums are what it puts in.

    Not safe to share between threads: commands and collectives of all ranks come in one order.
    """

    def __init__(self, rank: int = 0, world: int = 1, seconds: float = 600.0) -> None:
        """Nothing is connected yet.

        Args:
            rank: Ours.
            world: All of them.
            seconds: Deadline of a collective.
        """
        self.rank, self.world = rank, world
        self.lost = ""
        """Why the ranks will never be complete, once that is known."""
        self._timeout = timedelta(seconds=seconds)
        self._store: Store | None = None
        self._number = self._openings = 0

    def host(self) -> int:
        """Host the store on this machine, for ranks that rank 0 starts itself; return its port."""
        store = TCPStore("127.0.0.1", 0, None, True, timeout=OPENING, wait_for_workers=False)
        self._store = PrefixStore("ranks/0", store)
        return int(store.port)

    def meet(self) -> None:
        """Find the store; rank 0 or torchrun hosts it. No other rank needs to be there yet.

        Raises:
            RankError: It was not found in time.
        """
        if self.world == 1 or self._store is not None:
            return
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(host, port, None, self.rank == 0 and not hosted, timeout=OPENING, wait_for_workers=False)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} found no store at {host}:{port}: {error}") from error
        # torchrun keeps its store over restarts of the ranks
        self._store = PrefixStore(f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def open(self, device: torch.device) -> None:
        """Make the process group: a collective, in which all ranks take part.

        Args:
            device: Of the models; what is summed up may be there too.

        Raises:
            RankError: Some rank did not come in time.
        """
        if self.world == 1 or dist.is_initialized():
            return
        assert self._store is not None, "meet() comes first"
        self._openings += 1
        store = PrefixStore(f"group/{self._openings}", self._store)  # what another group has left there is not ours
        self._wait_for_all(store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world,
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise RankError(f"the {self.world} ranks did not come together: {error}") from error

    def _wait_for_all(self, store: Store) -> None:
        """Wait outside of any collective until every rank is about to make the group."""
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
                    why = self.lost or f"ranks {missing} did not come within {OPENING.total_seconds():g} s"
                    raise RankError(f"the {self.world} ranks did not come together: {why}") from error
            except RuntimeError as error:
                raise RankError(f"the store of the ranks is gone, and rank 0 with it: {error}") from error

    def announce(self, command: str, body: bytes = b"", **arguments: Any) -> None:
        """Tell the others what comes next; rank 0 alone.

        Args:
            command: Its name.
            body: What they need besides.
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

    def next(self, patience: float = math.inf) -> Command:
        """Wait, for as long as rank 0 lives, for the next command; for the other ranks.

        Args:
            patience: Seconds after which it should have come.

        Raises:
            RankError: Rank 0 is gone, or announced nothing in time.
        """
        ends = time.monotonic() + patience
        assert self._store is not None, "meet() comes first"
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
        return Command(name, arguments, body)

    @contextmanager
    def command(self, name: str, body: bytes = b"", **arguments: Any) -> Iterator[None]:
        """Announce a command, do rank 0's part of it in the ``with`` block, and vote; see :meth:`agreed`."""
        self.announce(name, body, **arguments)
        with self.agreed(name):
            yield

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Do a rank's part of the command ``what`` in the ``with`` block; it ends on all ranks alike.

        Raises:
            FailedElsewhereError: The command failed on another rank; a rank's own error is raised as it is.
            RankError: Another rank is not usable any more, or did not vote.
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
        if worst.kind == "failed":
            raise FailedElsewhereError(text, worst.error)
        if worst.kind == "broken":
            raise RankError(text)

    def _fail(self, what: str, error: Exception) -> None:
        """Vote with an error; return where it is the one that all ranks end the command with.

        Raises:
            RankError: Some rank is not usable any more.
        """
        own = Vote.of(error)
        try:
            worst, rank = self._worst(self._votes(what, self._patience(what, own), own))
        except RankError:
            if own.kind == "broken":
                return  # the cause says more than that the others are gone
            raise
        if worst.kind == "broken" != own.kind:
            raise RankError(f"{what!r} failed on rank {rank} of {self.world}: {worst.reason}") from error

    def _patience(self, what: str, own: Vote) -> float:
        """Return the seconds in which this rank, on which a command has failed, waits for the votes of the others."""
        if own.kind == "broken" and self.rank == 0:
            return 0.0  # the others end with it
        if own.kind != "broken" and what == "open":
            return self._timeout.total_seconds()  # they may still be reading
        return VOTE_GRACE

    @staticmethod
    def _worst(votes: Sequence[Vote]) -> tuple[Vote, int]:
        """Return the most severe vote, and the first rank that cast it."""
        rank = max(range(len(votes)), key=lambda one: _SEVERITY.index(votes[one].kind))
        return votes[rank], rank

    def _votes(self, what: str, patience: float, own: Vote) -> list[Vote]:
        """Cast a vote on the command under way and return those of all ranks, by rank.

        Raises:
            RankError: A rank did not vote in time, or is gone.
        """
        assert self._store is not None
        keys = [f"vote/{self._number}/{rank}" for rank in range(self.world)]
        ends = time.monotonic() + patience
        try:
            self._store.set(keys[self.rank], msgpack.packb([own.kind, own.error, own.reason[:REASON_LENGTH]]))
            self._wait_for_votes(what, keys, ends)
            found = [Vote(*msgpack.unpackb(vote)) for vote in self._store.multi_get(keys)]
            if self._number > KEPT:
                self._store.delete_key(f"vote/{self._number - KEPT}/{self.rank}")
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"the vote on {what!r} failed on rank {self.rank}: {error}") from error
        return found

    def _wait_for_votes(self, what: str, keys: list[str], ends: float) -> None:
        assert self._store is not None
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=max(0.01, min(1.0, ends - time.monotonic()))))
                return
            except dist.DistStoreError as error:
                if self.lost or time.monotonic() > ends:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    why = self.lost or f"ranks {missing} are still at it"
                    raise RankError(f"the ranks did not end {what!r} together: {why}") from error

    def _first_failure(self) -> str:
        """Return who has failed at the command under way, and why, as far as that rank could say so."""
        if self._store is None:
            return ""
        for rank in (one for one in range(self.world) if one != self.rank):
            key = f"vote/{self._number}/{rank}"
            with suppress(RuntimeError):
                if self._store.check([key]) and (vote := Vote(*msgpack.unpackb(self._store.get(key)))).reason:
                    return f"; rank {rank} failed first: {vote.reason}"
        return ""

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
        """Return what every rank puts in, by rank; small values."""
        if self.world == 1:
            return [value]
        found: list[T | None] = [None] * self.world
        with self.together("gathering"):
            dist.all_gather_object(found, value)
        return [one for one in found if one is not None]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do ``what`` in the ``with`` block, which other ranks take part in: torch's error of a collective there is a
        :class:`RankError`.
        """
        try:
            yield
        except (RankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if self.world == 1:
                raise
            raise RankError(
                f"{what} of rank {self.rank} of {self.world} failed: {error}; another rank is gone, or took longer "
                f"than {self._timeout.total_seconds():g} s (trainer.rank_timeout){self._first_failure()}"
            ) from error

    def close(self) -> None:
        """Give the process group back."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


class RankProcesses:
    """The ranks above 0 as processes of rank 0, which starts them with its own command line; none where torchrun has
    started them.
    """

    def __init__(self, ranks: Ranks, grace: float = 10.0) -> None:
        """Nothing is started yet.

        Args:
            ranks: Rank 0's.
            grace: Seconds in which the others end by themselves once they were told to.
        """
        self._ranks, self._grace = ranks, grace
        self._children: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start them, and tell them in their environment where to find us."""
        if self._ranks.world == 1 or is_started_by_torchrun():
            return
        port = await asyncio.to_thread(self._ranks.host)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT_VARIABLE: str(os.getpid())}
        meeting |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else each look for a command is a warning on stderr
        for rank in range(1, self._ranks.world):
            own = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._children.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, *sys.orig_argv[1:]), env=os.environ | own, stdin=subprocess.DEVNULL
                )
            )

    async def watch(self) -> None:
        """Wait until one of them ends, for ever where there is none.

        Raises:
            RankError: One did.
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
        raise RankError(self._ranks.lost)

    async def end(self) -> None:
        """Wait for them to end, and kill what does not."""
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
    """Set up the process of a rank above 0: it ends with rank 0, which alone decides when that is."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent), signal.SIGKILL)
