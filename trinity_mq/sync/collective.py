"""The collective channel: a barrier on a TCPStore, then a bucketed broadcast in a process group of its own.

The group belongs to one epoch (one membership) and is kept between its versions. Each use runs on a daemon thread with
a deadline: a
stuck one is abandoned, never waited for, and whatever failed is not used again. Only a full barrier enters the
collective.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_mq.sync.flat import ManifestEntry, fill, plan, split

T = TypeVar("T")
Backend = Literal["gloo", "nccl"]


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

    def __init__(
        self, store: Store, epoch: int, rank: int, world: int, seconds: float, backend: Backend = "gloo"
    ) -> None:
        self.store, self.epoch, self.rank, self.world = store, epoch, rank, world
        self.timeout = timedelta(seconds=seconds)
        self._backend = backend
        self._group: Any = None

    def barrier(self, attempt: int) -> None:
        """Say that this rank is here and wait for all the others, or raise after the timeout."""
        keys = [f"at/{self.epoch}/{attempt}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], "1")
        self.store.wait(keys, self.timeout)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send ``flat`` from rank 0 into everybody's ``flat``; it is on the CPU, whatever the way."""
        if self._group is None:
            self._group = self._opened()
        travelling = flat.cuda() if self._backend == "nccl" else flat
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        self._group.broadcast([travelling], options).wait(self.timeout)
        if travelling is not flat and self.rank:
            flat.copy_(travelling)

    def _opened(self) -> Any:
        store = PrefixStore(f"pg/{self.epoch}", self.store)
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(store, self.rank, self.world, self.timeout)
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise CollectiveError(
                "synchronizer.backend is nccl, and this process has no GPU or a torch without NCCL; trainer and "
                "engines need a GPU each, else use gloo"
            )
        # a peer that does not come is an error here after the timeout, not the end of the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout  # noqa: SLF001  # the only way to set it on a group of one's own
        return dist.ProcessGroupNCCL(store, self.rank, self.world, options)


class Sender:
    """The trainer's end: hosts the rendezvous and broadcasts."""

    def __init__(self, host: str, bucket_bytes: int, seconds: float, backend: Backend = "gloo") -> None:
        self.host, self.bucket_bytes, self.seconds, self.backend = host, bucket_bytes, seconds, backend
        self._store: TCPStore | None = None
        self._group: Group | None = None

    async def rendezvous(self) -> dict[str, Any]:
        """Return where the members meet us; the store is opened at first use."""
        store = self._store
        if store is None:
            self._store = store = await in_daemon_thread(self._open, self.seconds, "rendezvous")
        return {"host": self.host, "port": store.port, "bucket_bytes": self.bucket_bytes, "backend": self.backend}

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
            self._group = Group(self._store, epoch, 0, world, self.seconds, self.backend)
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

        ``spec``: host, port, bucket_bytes, backend, epoch, attempt, rank, world, seconds, manifest.

        Raises:
            CollectiveError: Nothing was received; nothing of the model was touched.
        """
        work = self._prepared(spec)
        group, tensors = await in_daemon_thread(work, float(spec["seconds"]) + 1.0, "receive")
        self._keep(group, spec)
        return tensors

    def receive_blocking(self, spec: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Receive in this thread, for a process that has no event loop; see :meth:`receive`. Raises what torch does."""
        group, tensors = self._prepared(spec)()
        self._keep(group, spec)
        return tensors

    def _prepared(self, spec: dict[str, Any]) -> Callable[[], tuple[Group, dict[str, torch.Tensor]]]:
        seconds = float(spec["seconds"])
        address = _address(spec)
        manifest: list[ManifestEntry] = [(name, dtype, list(shape)) for name, dtype, shape in spec["manifest"]]
        kept = self._group if self._group and self._address == address and self._group.epoch == spec["epoch"] else None
        self._group = None  # until this one is through

        def work() -> tuple[Group, dict[str, torch.Tensor]]:
            group = kept
            if group is None:
                store = TCPStore(*address, None, False, timedelta(seconds=seconds))
                backend = spec.get("backend", "gloo")
                group = Group(store, int(spec["epoch"]), int(spec["rank"]), int(spec["world"]), seconds, backend)
            group.barrier(int(spec["attempt"]))
            tensors: dict[str, torch.Tensor] = {}
            for bucket in plan(manifest, int(spec["bucket_bytes"])):
                flat = torch.empty(bucket.num_elements, dtype=bucket.dtype)
                group.broadcast(flat)
                tensors.update(split(bucket, flat))
            return group, tensors

        return work

    def _keep(self, group: Group, spec: dict[str, Any]) -> None:
        self._group, self._address = group, _address(spec)


def _address(spec: dict[str, Any]) -> tuple[str, int]:
    return str(spec["host"]), int(spec["port"])


_RECEIVER = Receiver()


async def receive_weights(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Receive in this process's one group; see :meth:`Receiver.receive`."""
    return await _RECEIVER.receive(spec)
