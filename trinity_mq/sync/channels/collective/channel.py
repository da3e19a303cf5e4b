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
    """Broadcasts from a host copy. The copy starts with the offer, while engines still serve, and continues bucket by
    bucket during the broadcast. Members that missed the broadcast fetch from the same copy.

    Args:
        host: Address of the rendezvous.
        bucket_bytes: Size of one broadcast.
        seconds: Limit of the barrier and of each step of the collective.
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
        self._copy: HostCopy | None = None

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Prepare the weights for catch-up fetches, and return the rendezvous."""
        if isinstance(self._pulls, MemoryChannel):
            self._copy = self._pulls.begin(version, tensors, manifest, digests=False)
            if any(hasattr(tensor, "full_tensor") for _, tensor in tensors):
                # gathering shards is a collective of the trainer's ranks, which must keep its order among their other
                # collectives
                self._copy = await self._pulls.stage(version, tensors, manifest, digests=False)
        else:
            await self._pulls.offer(version, tensors, manifest)
        return await self._sender.rendezvous()

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Meet the members and send them the weights. With gloo and a host copy, send the copy. Otherwise pack the
        tensors bucket by bucket, as for a transfer between GPUs.
        """
        if self._copy is not None and self._sender.backend == "gloo":
            await self._sender.send(self._copy.stream(), manifest, epoch, attempt, world)
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
