"""The collective: a barrier on a TCPStore, then a bucketed broadcast in a process group of its own.

The group belongs to one epoch (one membership) and is kept between its versions. Each use runs on a daemon thread with
a deadline: a stuck one is abandoned, never waited for, and whatever failed is not used again. Only a full barrier
enters the collective.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_mq.sync.channels.base import ChannelError, Manifest, Tensors, in_daemon_thread
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, ahead, entries_of, packed, plan, split

Backend = Literal["gloo", "nccl"]
UNDER_WAY = 2
"""Broadcasts of buckets under way at a time: the next one is begun before its predecessor has ended at the slowest."""
ROOM_ON_DEVICE = 1.25
"""Free device memory over the size of the weights from which on tensors received by NCCL stay on the device until all
have arrived; with less they go to the host, bucket by bucket."""


def nccl_missing() -> str | None:
    """Return why this process cannot use NCCL, None if it can."""
    if dist.is_nccl_available() and torch.cuda.is_available():
        return None
    return (
        "synchronizer.backend is nccl, and this process has no GPU or a torch without NCCL; trainer and engines need a "
        "GPU each, else use gloo"
    )


class Group:
    """One epoch's process group, seen from one rank."""

    def __init__(
        self, store: Store, epoch: int, rank: int, world: int, seconds: float, backend: Backend = "gloo"
    ) -> None:
        self.store, self.epoch, self.rank, self.world = store, epoch, rank, world
        self.timeout = timedelta(seconds=seconds)
        self._backend = backend
        self._group: Any = None
        self._key: str | None = None
        """This rank's key of the last barrier."""

    @property
    def device(self) -> torch.device:
        """Device on which broadcast tensors must be; of several GPUs the one that this process uses."""
        if self._backend == "gloo":
            return torch.device("cpu")
        if (missing := nccl_missing()) is not None:
            raise ChannelError(missing)
        return torch.device("cuda", torch.cuda.current_device())

    def barrier(self, attempt: int) -> None:
        """Say that this rank is here and wait for all the others, or raise after the timeout.

        Each rank then deletes its key of the barrier before, which all have passed: the store is memory of rank 0, and
        would grow with each use.
        """
        keys = [f"at/{self.epoch}/{attempt}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], "1")
        self.store.wait(keys, self.timeout)
        if self._key not in {None, keys[self.rank]}:
            self.store.delete_key(self._key)
        self._key = keys[self.rank]

    def broadcast(self, flats: Iterable[Tensor]) -> Iterator[Tensor]:
        """Send the tensors, on :attr:`device`, from rank 0 into everybody's, and yield each once it is through.

        Some are under way at a time, so that a tensor is taken before the last ones were yielded.
        """
        if self._group is None:
            self._group = self._opened()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        under_way: deque[tuple[Any, Tensor]] = deque()
        for flat in flats:
            under_way.append((self._group.broadcast([flat], options), flat))
            if len(under_way) == UNDER_WAY:
                yield self._through(*under_way.popleft())
        while under_way:
            yield self._through(*under_way.popleft())

    def _through(self, work: Any, flat: Tensor) -> Tensor:
        work.wait(self.timeout)
        return flat

    def _opened(self) -> Any:
        store, device = PrefixStore(f"pg/{self.epoch}", self.store), self.device
        if device.type == "cpu":
            return dist.ProcessGroupGloo(store, self.rank, self.world, self.timeout)
        # a peer that does not come is an error here after the timeout, not the end of the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout  # noqa: SLF001  # the only way to set it on a group of one's own
        group = dist.ProcessGroupNCCL(store, self.rank, self.world, options)
        group.eager_connect_single_device(device)  # a device that cannot be had shows now, not in the first broadcast
        return group


class Sender:
    """The trainer's end: hosts the rendezvous and broadcasts."""

    def __init__(self, host: str, bucket_bytes: int, seconds: float, backend: Backend = "gloo") -> None:
        self.host, self.bucket_bytes, self.seconds, self.backend = host, bucket_bytes, seconds, backend
        self._store: TCPStore | None = None
        self._nonce = ""
        self._group: Group | None = None

    async def rendezvous(self) -> dict[str, Any]:
        """Return where the members meet us; the store is opened at first use."""
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
        }

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet ``world - 1`` members at the barrier and send them the tensors, each gathered and packed while the
        bucket before is on the wire; see :meth:`send`.
        """
        spare = SpareBuffers()
        buckets = plan(manifest, self.bucket_bytes)

        def send(group: Group) -> None:
            for flat in group.broadcast(ahead(packed(buckets, tensors, group.device, spare.take))):
                spare.put(flat)

        await self._meet(send, epoch, attempt, world)

    async def send(self, flats: Iterable[Tensor], epoch: int, attempt: int, world: int) -> None:
        """Meet ``world - 1`` members at the barrier and send them flat buckets, on the device of the group.

        Args:
            flats: The buckets of what the members know as the manifest; may block until a bucket is there.
            epoch: A new one makes a new group.
            attempt: Names the barrier.
            world: Members and ourselves.

        Raises:
            ChannelError: It failed; the group is gone and the next use needs a new epoch.
        """

        def send(group: Group) -> None:
            for _ in group.broadcast(flats):
                pass

        await self._meet(send, epoch, attempt, world)

    async def _meet(self, send: Callable[[Group], None], epoch: int, attempt: int, world: int) -> None:
        if self._store is None:
            raise ChannelError("no rendezvous is open")
        if self._group is None or self._group.epoch != epoch:
            self._group = Group(self._store, epoch, 0, world, self.seconds, self.backend)
        group = self._group

        def work() -> None:
            group.barrier(attempt)
            send(group)

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
        self._address: tuple[object, ...] = ()

    async def receive(self, spec: dict[str, Any], spare: SpareBuffers) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the broadcast tensors by name, on the CPU or, by NCCL, where there is room, and the buffers, taken
        from ``spare``, that they are views of.

        ``spec``: host, port, nonce, bucket_bytes, backend, epoch, attempt, rank, world, seconds, manifest.

        Raises:
            ChannelError: The barrier did not fill, a peer died, or time ran out; nothing of the model was touched.
        """
        kept, seconds = self._take_group(spec), float(spec["seconds"]) + 1.0
        group, tensors, flats = await in_daemon_thread(lambda: _received(kept, spec, spare), seconds, "receive")
        self._group = group
        return tensors, flats

    def receive_blocking(self, spec: dict[str, Any]) -> dict[str, Tensor]:
        """Receive in this thread, for a process that has no event loop; see :meth:`receive`. Raises what torch does."""
        self._group, tensors, _ = _received(self._take_group(spec), spec, SpareBuffers())
        return tensors

    def _take_group(self, spec: dict[str, Any]) -> Group | None:
        """Return the group of the last transfer if this one is to use it; it is ours again when that is through."""
        # with the nonce: a trainer that was restarted may have the port, and the epoch, of the one before
        address = (spec["host"], spec["port"], spec.get("nonce"))
        known, self._group = self._group, None
        is_same = self._address == address and known is not None and known.epoch == spec["epoch"]
        self._address = address
        return known if is_same else None


def _received(
    group: Group | None, spec: dict[str, Any], spare: SpareBuffers
) -> tuple[Group, dict[str, Tensor], list[Tensor]]:
    if group is None:
        limit = timedelta(seconds=float(spec["seconds"]))
        store = TCPStore(str(spec["host"]), int(spec["port"]), None, False, limit)
        rank, world, backend = int(spec["rank"]), int(spec["world"]), spec.get("backend", "gloo")
        group = Group(store, int(spec["epoch"]), rank, world, float(spec["seconds"]), backend)
    group.barrier(int(spec["attempt"]))
    buckets = plan(entries_of(spec["manifest"]), int(spec["bucket_bytes"]))
    stays = _stays(buckets, group.device)
    tensors: dict[str, Tensor] = {}
    flats: list[Tensor] = []
    arriving = group.broadcast(spare.take(bucket, group.device) for bucket in buckets)
    for bucket, flat in zip(buckets, arriving, strict=True):
        flats.append(flat if stays else spare.take(bucket).copy_(flat))
        tensors.update(split(bucket, flats[-1]))
    return group, tensors, flats


def _stays(buckets: list[Bucket], device: torch.device) -> bool:
    """Say whether what arrives on ``device`` can stay there until all of it has."""
    if device.type == "cpu":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return ROOM_ON_DEVICE * sum(bucket.num_bytes for bucket in buckets) < free
