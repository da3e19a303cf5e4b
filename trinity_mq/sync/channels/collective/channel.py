"""The collective channel: a broadcast to all members at once, with a second channel for catch-up fetches."""

from __future__ import annotations

from typing import Any

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import CatchUpSource, Manifest, Tensors
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.collective.broadcast import Backend, Sender
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy


class CollectiveChannel:
    """Broadcasts a host copy or the live weights to all members; members that missed the broadcast fetch through a
    second channel.

    If this second channel is the memory channel, its host copy starts with the offer, while engines still serve, and
    continues bucket by bucket during the broadcast. With gloo the broadcast then reads the copy, with NCCL the live
    weights. If the second channel writes files, the live weights are broadcast.

    Sharded weights and merged adapters are read once, in the offer, because reading them is a collective of the
    trainer's ranks. Broadcast, files and fetches then read a complete host copy.

    Args:
        host: Address of the rendezvous.
        bucket_bytes: Size of one broadcast.
        seconds: Limit of the barrier, and of each broadcast in addition to its duration at the slowest acceptable rate.
        backend: Backend of the broadcast.
        pulls: Channel for members that missed a broadcast. A file channel writes each version before the broadcast.
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
        self._memory = pulls if isinstance(pulls, MemoryChannel) else MemoryChannel(host, bucket_bytes, seconds)
        """Holds the host copies. It serves them only if members fetch from memory."""
        self._copy: HostCopy | None = None
        """Host copy to broadcast. None: broadcast the live weights."""

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Copy or write the weights as far as the broadcast and catch-up fetches need it, and return the rendezvous."""
        self._copy = None
        if any(hasattr(tensor, "full_tensor") for _, tensor in tensors):
            self._copy = await self._memory.stage(version, tensors, manifest, digests=False)
            tensors = self._copy.tensors()
        elif self._pulls is self._memory:
            copy = self._memory.begin(version, tensors, manifest, digests=False)
            # with NCCL the live weights are broadcast, not the host copy
            self._copy = copy if self._sender.backend == "gloo" else None
        if isinstance(self._pulls, CheckpointChannel):
            await self._pulls.offer(version, tensors, manifest)
        return await self._sender.rendezvous()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet the members and send them the weights: the host copy, or the live weights packed bucket by bucket."""
        if self._copy is not None:
            await self._sender.send(self._copy.stream(), manifest, epoch, attempt, world)
        else:
            await self._sender.broadcast(tensors, manifest, epoch, attempt, world)

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        await self._pulls.committed(version, tensors, manifest)
        if self._pulls is not self._memory:
            self._copy = None
            self._memory.abandon()  # the next version fills the same buffers

    async def catch_up_source(self) -> CatchUpSource | None:
        return await self._pulls.catch_up_source()

    def abandon(self) -> None:
        self._sender.abandon()
        self._copy = None
        self._memory.abandon()
        self._pulls.abandon()

    async def close(self) -> None:
        self._sender.abandon()
        self._copy = None
        await self._memory.close()
        await self._pulls.close()
