"""The collective channel: a barrier on a TCPStore, then a bucketed broadcast in a process group of its own.

The group belongs to one epoch (one membership) and is kept between its versions. Each use runs on a daemon thread with
a deadline: a
stuck one is abandoned, never waited for, and whatever failed is not used again. Only a full barrier enters the
collective.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_mq.sync.flat import ManifestEntry, fill, plan, split

T = TypeVar("T")


class CollectiveError(Exception):
    """The barrier did not fill, a peer died, or time ran out."""


async def in_daemon_thread(work: Callable[[], T], seconds: float, name: str) -> T:
    """Run ``work`` on a daemon thread of its own; abandon it after ``seconds``.

    Raises:
        CollectiveError: Time ran out, or the work failed.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(CollectiveError(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only when T is None

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # abandoned, and the loop has closed since

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError:
        raise CollectiveError(f"{name} did not end within {seconds:g} s") from None


class Group:
    """One epoch's process group, seen from one rank."""

    def __init__(self, store: Store, epoch: int, rank: int, world: int, seconds: float) -> None:
        self.store, self.epoch, self.rank, self.world = store, epoch, rank, world
        self.timeout = timedelta(seconds=seconds)
        self._group: Any = None

    def barrier(self, attempt: int) -> None:
        """Say that this rank is here and wait for all the others, or raise after the timeout."""
        keys = [f"at/{self.epoch}/{attempt}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], "1")
        self.store.wait(keys, self.timeout)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send ``flat`` from rank 0 into everybody's ``flat``."""
        if self._group is None:
            self._group = dist.ProcessGroupGloo(
                PrefixStore(f"pg/{self.epoch}", self.store), self.rank, self.world, self.timeout
            )
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        self._group.broadcast([flat], options).wait(self.timeout)


class Sender:
    """The trainer's end: hosts the rendezvous and broadcasts."""

    def __init__(self, host: str, bucket_bytes: int, seconds: float) -> None:
        self.host, self.bucket_bytes, self.seconds = host, bucket_bytes, seconds
        self._store: TCPStore | None = None
        self._group: Group | None = None

    async def rendezvous(self) -> dict[str, Any]:
        """Return where the members meet us; the store is opened at first use."""
        store = self._store
        if store is None:
            self._store = store = await in_daemon_thread(self._open, self.seconds, "rendezvous")
        return {"host": self.host, "port": store.port, "bucket_bytes": self.bucket_bytes}

    async def broadcast(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        manifest: list[ManifestEntry],
        epoch: int,
        attempt: int,
        world: int,
    ) -> None:
        """Meet ``world - 1`` members at the barrier and send them the tensors.

        Raises:
            CollectiveError: It failed; the group is gone and the next use needs a new epoch.
        """
        if self._store is None:
            raise CollectiveError("no rendezvous is open")
        if self._group is None or self._group.epoch != epoch:
            self._group = Group(self._store, epoch, 0, world, self.seconds)
        group, named = self._group, dict(tensors)

        def work() -> None:
            group.barrier(attempt)
            for bucket in plan(manifest, self.bucket_bytes):
                group.broadcast(fill(bucket, named))

        try:
            await in_daemon_thread(work, self.seconds + 1.0, "broadcast")
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Never use the group and the rendezvous again: the next epoch gets new ones."""
        self._group, self._store = None, None

    def _open(self) -> TCPStore:
        return TCPStore(self.host, 0, None, True, timedelta(seconds=self.seconds), wait_for_workers=False)


class Receiver:
    """A member's end, in the engine's process."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._address: tuple[str, int] | None = None

    async def receive(self, spec: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the broadcast tensors by name, on the CPU.

        ``spec``: host, port, bucket_bytes, epoch, attempt, rank, world, seconds, manifest.

        Raises:
            CollectiveError: Nothing was received; nothing of the model was touched.
        """
        seconds = float(spec["seconds"])
        address = (str(spec["host"]), int(spec["port"]))
        manifest: list[ManifestEntry] = [(name, dtype, list(shape)) for name, dtype, shape in spec["manifest"]]
        kept = self._group if self._group and self._address == address and self._group.epoch == spec["epoch"] else None
        self._group = None  # until this one is through

        def work() -> tuple[Group, dict[str, torch.Tensor]]:
            group = kept
            if group is None:
                store = TCPStore(*address, None, False, timedelta(seconds=seconds))
                group = Group(store, int(spec["epoch"]), int(spec["rank"]), int(spec["world"]), seconds)
            group.barrier(int(spec["attempt"]))
            tensors: dict[str, torch.Tensor] = {}
            for bucket in plan(manifest, int(spec["bucket_bytes"])):
                flat = torch.empty(bucket.num_elements, dtype=bucket.dtype)
                group.broadcast(flat)
                tensors.update(split(bucket, flat))
            return group, tensors

        group, tensors = await in_daemon_thread(work, seconds + 1.0, "receive")
        self._group, self._address = group, address
        return tensors


_RECEIVER = Receiver()


async def receive_weights(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Receive in this process's one group; see :meth:`Receiver.receive`."""
    return await _RECEIVER.receive(spec)
