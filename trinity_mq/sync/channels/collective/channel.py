"""The collective channel: a broadcast to all members at once, and beside it a place where one alone pulls from."""

from __future__ import annotations

from typing import Any

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import CatchUpSource, Manifest, Tensors
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.collective.broadcast import Backend, Sender
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy


class CollectiveChannel:
    """Broadcasts a host copy, which is made from the offer on: while engines still serve, and then bucket by bucket
    while the one before is on the wire. Members that missed it pull from the same copy.

    Args:
        host: Where the rendezvous listens.
        bucket_bytes: Size of one broadcast.
        seconds: Limit of the barrier and of each step of the collective.
        backend: What carries it.
        pulls: Serves members that missed a broadcast. With files each version is written before it is sent.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int,
        seconds: float,
        backend: Backend,
        pulls: MemoryChannel | CheckpointChannel,
    ) -> None:
        self._sender = Sender(host, bucket_bytes, seconds, backend)
        self._pulls = pulls
        self._copy: HostCopy | None = None

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Make ready what members pull, and say where to meet."""
        if isinstance(self._pulls, MemoryChannel):
            self._copy = self._pulls.begin(version, tensors, manifest, digests=False)
            if any(hasattr(tensor, "full_tensor") for _, tensor in tensors):
                # gathering shards is a collective of the trainer's ranks, in an order with their others
                self._copy = await self._pulls.stage(version, tensors, manifest, digests=False)
        else:
            await self._pulls.offer(version, tensors, manifest)
        return await self._sender.rendezvous()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet the members and send them the weights: the host copy, or where there is none, or they go from a GPU to
        others, the tensors, packed bucket by bucket.
        """
        if self._copy is not None and self._sender.backend == "gloo":
            await self._sender.send(self._copy.stream(), epoch, attempt, world)
        else:
            await self._sender.broadcast(tensors, manifest, epoch, attempt, world)

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        await self._pulls.committed(version, tensors, manifest)

    async def catch_up_source(self) -> CatchUpSource | None:
        return await self._pulls.catch_up_source()

    def abandon(self) -> None:
        self._sender.abandon()
        self._copy = None
        self._pulls.abandon()

    async def close(self) -> None:
        self._sender.abandon()
        self._copy = None
        await self._pulls.close()
