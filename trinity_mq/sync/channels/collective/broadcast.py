"""The collective: a barrier on a TCPStore, then a bucketed broadcast in a separate process group.

The group belongs to one epoch (one membership) and is kept across the versions of this epoch. Each use runs on a daemon
thread with a deadline. A stuck thread is abandoned, never waited for, and a failed group is not used again. Ranks enter
the collective only after the barrier is full.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_mq.sync.channels.base import (
    ChannelError,
    Manifest,
    Tensors,
    in_daemon_thread,
    manifest_bytes,
    source_copies,
    transfer_seconds,
)
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, entries_of, packed, plan, prefetch, split

Backend = Literal["gloo", "nccl"]
UNDER_WAY = 2
"""Number of concurrent bucket broadcasts: the next broadcast starts before the slowest rank has finished the previous
broadcast."""
ROOM_ON_DEVICE = 1.25
"""Minimum ratio of free device memory to the size of the weights for keeping tensors received by NCCL on the device
until all have arrived. With less memory they are copied to the host, bucket by bucket.
"""


def nccl_missing() -> str | None:
    """Return the reason why this process cannot use NCCL, None if it can."""
    if dist.is_nccl_available() and torch.cuda.is_available():
        return None
    return (
        "synchronizer.backend is nccl, and this process has no GPU or a torch without NCCL; trainer and engines need a "
        "GPU each, else use gloo"
    )


@dataclass(frozen=True, slots=True)
class Transport:
    """A backend of the broadcast."""

    device: Callable[[], torch.device]
    """Returns the device of the broadcast tensors; raises ChannelError if this process has no such device."""
    connect: Callable[[Store, int, int, timedelta, torch.device], Any]
    """Returns a process group for a store, rank, world, timeout and device."""


def _cuda_device() -> torch.device:
    if (missing := nccl_missing()) is not None:
        raise ChannelError(missing)
    return torch.device("cuda", torch.cuda.current_device())


def _connect_nccl(store: Store, rank: int, world: int, timeout: timedelta, device: torch.device) -> Any:
    # an absent peer must cause an error here after the timeout, not end the process
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    torch.cuda.set_device(device)  # set per thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001  # the only way to set it on a group of one's own
    if hasattr(options, "config"):
        # otherwise a thread that waits for an absent peer in ncclCommInitRank never returns
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(timeout.total_seconds()))))
        options.config.blocking = 0
    group = dist.ProcessGroupNCCL(store, rank, world, options)
    group.eager_connect_single_device(device)  # makes an unusable device fail here, not in the first broadcast
    return group


def _connect_gloo(store: Store, rank: int, world: int, timeout: timedelta, device: torch.device) -> Any:
    return dist.ProcessGroupGloo(store, rank, world, timeout)


TRANSPORTS: dict[Backend, Transport] = {
    "gloo": Transport(lambda: torch.device("cpu"), _connect_gloo),
    "nccl": Transport(_cuda_device, _connect_nccl),
}


class Group:
    """One epoch's process group, from the view of one rank."""

    def __init__(
        self, store: Store, epoch: int, rank: int, world: int, seconds: float, backend: Backend = "gloo"
    ) -> None:
        self.store, self.epoch, self.rank, self.world = store, epoch, rank, world
        self.timeout = timedelta(seconds=seconds)
        """Limit of the barrier, and of a broadcast in addition to its duration at the slowest acceptable rate."""
        self._transport = TRANSPORTS[backend]
        self._group: Any = None
        self._key: str | None = None
        """Key of this rank at the last barrier."""
        self.is_abandoned = False
        """Whether no further broadcast may begin. An abandoned thread may still wait for an earlier broadcast."""

    @property
    def device(self) -> torch.device:
        """Device of the broadcast tensors. With several GPUs it is the GPU that this process uses."""
        return self._transport.device()

    def barrier(self, attempt: int) -> None:
        """Announce this rank and wait for all other ranks, or raise after the timeout.

        Each rank then deletes its key of the previous barrier, which all ranks have passed. The store is memory of rank
        0, and would otherwise grow with each use.
        """
        keys = [f"at/{self.epoch}/{attempt}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], "1")
        self.store.wait(keys, self.timeout)
        if self._key not in {None, keys[self.rank]}:
            self.store.delete_key(self._key)
        self._key = keys[self.rank]

    def broadcast(self, flats: Iterable[Tensor]) -> Iterator[Tensor]:
        """Broadcast tensors on :attr:`device` from rank 0 to all ranks, and yield each tensor when it is complete.

        Several broadcasts run concurrently, so the iterator is advanced before earlier tensors have been yielded.
        """
        if self._group is None:
            store = PrefixStore(f"pg/{self.epoch}", self.store)
            self._group = self._transport.connect(store, self.rank, self.world, self.timeout, self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        under_way: deque[tuple[Any, Tensor]] = deque()
        for flat in flats:
            if self.is_abandoned:
                raise ChannelError("the broadcast was abandoned")
            options.timeout = self._limit(flat)
            under_way.append((self._group.broadcast([flat], options), flat))
            if len(under_way) == UNDER_WAY:
                yield self._wait_for(*under_way.popleft())
        while under_way:
            yield self._wait_for(*under_way.popleft())

    def _wait_for(self, work: Any, flat: Tensor) -> Tensor:
        work.wait(self._limit(flat))
        return flat

    def _limit(self, flat: Tensor) -> timedelta:
        """Return the limit of one broadcast, during which other broadcasts share the link."""
        copies = UNDER_WAY * source_copies("collective", self.world - 1)
        return timedelta(seconds=transfer_seconds(self.timeout.total_seconds(), flat.nbytes, copies))


class Sender:
    """The trainer's end: hosts the rendezvous and broadcasts."""

    def __init__(self, host: str, bucket_bytes: int, seconds: float, backend: Backend = "gloo") -> None:
        self.host, self.bucket_bytes, self.seconds, self.backend = host, bucket_bytes, seconds, backend
        self._store: TCPStore | None = None
        self._nonce = ""
        self._group: Group | None = None

    async def rendezvous(self) -> dict[str, Any]:
        """Return the instructions for a member, with the address where members meet the trainer. The first use opens
        the store.
        """
        store = self._store
        if store is None:
            self._store = store = await in_daemon_thread(self._open, self.seconds, "rendezvous")
            self._nonce = uuid.uuid4().hex
        return {
            "method": "collective",
            "host": self.host,
            "port": store.port,
            "nonce": self._nonce,
            "bucket_bytes": self.bucket_bytes,
            "backend": self.backend,
            "step_seconds": self.seconds,
        }

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet ``world - 1`` members at the barrier and send them the tensors. Each bucket is gathered and packed while
        the previous bucket is on the wire; see :meth:`send`.
        """
        spare = SpareBuffers()
        buckets = plan(manifest, self.bucket_bytes)

        def send(group: Group) -> None:
            for flat in group.broadcast(prefetch(packed(buckets, tensors, group.device, spare.take))):
                spare.put(flat)

        await self._meet(send, manifest, epoch, attempt, world)

    async def send(self, flats: Iterable[Tensor], manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet ``world - 1`` members at the barrier and send them flat buckets from host memory.

        Args:
            flats: Buckets of the manifest. The iterator may block until a bucket is ready.
            manifest: Manifest that the members know.
            epoch: A new epoch creates a new group.
            attempt: Identifies the barrier.
            world: Number of members plus the trainer.

        Raises:
            ChannelError: The broadcast failed. The group is gone, and the next use needs a new epoch.
        """

        def send(group: Group) -> None:
            device = group.device
            for _ in group.broadcast(flat.to(device, non_blocking=True) for flat in flats):
                pass

        await self._meet(send, manifest, epoch, attempt, world)

    async def _meet(
        self, send: Callable[[Group], None], manifest: Manifest, epoch: int, attempt: int, world: int
    ) -> None:
        if self._store is None:
            raise ChannelError("no rendezvous is open")
        if self._group is None or self._group.epoch != epoch:
            self._group = Group(self._store, epoch, 0, world, self.seconds, self.backend)
        group = self._group

        def work() -> None:
            group.barrier(attempt)
            send(group)

        limit = transfer_seconds(self.seconds, manifest_bytes(manifest), source_copies("collective", world - 1))
        try:
            await in_daemon_thread(work, limit + 1.0, "broadcast")
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop the group and the rendezvous; the next epoch creates both again."""
        if self._group is not None:
            self._group.is_abandoned = True
        self._group, self._store = None, None

    def _open(self) -> TCPStore:
        return TCPStore(self.host, 0, None, True, timedelta(seconds=self.seconds), wait_for_workers=False)


class Receiver:
    """A member's end, in the engine's process."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._address: tuple[object, ...] = ()

    async def receive(self, spec: dict[str, Any], spare: SpareBuffers) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the broadcast tensors by name, and the buffers that they are views of. Buffers come from ``spare``.
        Tensors are on the CPU or, with NCCL and enough memory, on the device.

        ``spec``: host, port, nonce, bucket_bytes, backend, epoch, attempt, rank, world, seconds (of the whole
        transfer), step_seconds (of the barrier and each broadcast), manifest.

        Raises:
            ChannelError: The barrier did not fill, a peer died, or the time limit passed. The model is unchanged.
        """
        group_to_reuse, seconds = self._take_group(spec), float(spec["seconds"]) + 1.0
        group, tensors, flats = await in_daemon_thread(
            lambda: _received(group_to_reuse, spec, spare), seconds, "receive"
        )
        self._group = group
        return tensors, flats

    def receive_blocking(
        self, spec: dict[str, Any], spare: SpareBuffers | None = None, *, keep: bool = True
    ) -> dict[str, Tensor]:
        """Receive in this thread, for a process without an event loop; see :meth:`receive`. Raises torch's errors.

        Without ``keep`` the call only takes part in the broadcast: it drops each bucket and returns an empty dict.
        """
        self._group, tensors, _ = _received(self._take_group(spec), spec, spare or SpareBuffers(), keep=keep)
        return tensors

    def _take_group(self, spec: dict[str, Any]) -> Group | None:
        """Return the group of the last transfer if it can be reused, else None. The receiver owns the group again after
        the transfer.
        """
        # the nonce tells trainers apart: a restarted trainer may have the same port and epoch
        address = (spec["host"], spec["port"], spec.get("nonce"))
        last_group, self._group = self._group, None
        is_same = self._address == address and last_group is not None and last_group.epoch == spec["epoch"]
        self._address = address
        return last_group if is_same else None


def _received(
    group: Group | None, spec: dict[str, Any], spare: SpareBuffers, *, keep: bool = True
) -> tuple[Group, dict[str, Tensor], list[Tensor]]:
    if group is None:
        seconds = min(float(spec["seconds"]), float(spec.get("step_seconds", spec["seconds"])))
        store = TCPStore(str(spec["host"]), int(spec["port"]), None, False, timedelta(seconds=seconds))
        rank, world, backend = int(spec["rank"]), int(spec["world"]), spec.get("backend", "gloo")
        group = Group(store, int(spec["epoch"]), rank, world, seconds, backend)
    group.barrier(int(spec["attempt"]))
    buckets = plan(entries_of(spec["manifest"]), int(spec["bucket_bytes"]))
    stays = _fits_on_device(buckets, group.device)
    tensors: dict[str, Tensor] = {}
    flats: list[Tensor] = []
    arriving = group.broadcast(spare.take(bucket, group.device) for bucket in buckets)
    for bucket, flat in zip(buckets, arriving, strict=True):
        if not keep:
            spare.put(flat)  # for the next bucket of this size
            continue
        flats.append(flat if stays else spare.take(bucket).copy_(flat))
        tensors.update(split(bucket, flats[-1]))
    return group, tensors, flats


def _fits_on_device(buckets: list[Bucket], device: torch.device) -> bool:
    """Return whether weights received on ``device`` can stay there until all have arrived."""
    if device.type == "cpu":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return ROOM_ON_DEVICE * sum(bucket.num_bytes for bucket in buckets) < free
