"""The collective channel over NCCL, with what one GPU allows: a world of one, through the code that gloo runs too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported

from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import packed, plan, split
from trinity_mq.sync.channels.collective.broadcast import Backend, Group, Receiver, Sender
from trinity_mq.sync.channels.collective.channel import CollectiveChannel
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test compiles flex attention

BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")
BUCKET = 4096


def weights(device: str) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tensors = [
        ("embed", torch.randn(70, 50, generator=generator)),
        ("half", torch.randn(40, 33, generator=generator).bfloat16()),
        ("count", torch.arange(7)),
        ("head", torch.randn(50, 70, generator=generator).T),
    ]
    return [(name, tensor.to(device)) for name, tensor in tensors]


MANIFEST = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights("cpu")]


def group(backend: Backend, epoch: int = 1) -> Group:
    return Group(TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), epoch, 0, 1, 30.0, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_opens_and_broadcasts_every_bucket(backend: Backend) -> None:
    one = group(backend)
    source = weights("cuda")
    for attempt in (1, 2):  # the group is kept between versions
        one.barrier(attempt)
        buckets = plan(MANIFEST, BUCKET)
        arrived: dict[str, torch.Tensor] = {}
        for bucket, flat in zip(buckets, one.broadcast(packed(buckets, source, one.device)), strict=True):
            assert flat.device.type == ("cuda" if backend == "nccl" else "cpu")
            arrived.update(split(bucket, flat))
        for name, tensor in source:
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name].cpu(), tensor.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_sender_broadcasts_and_leaves_a_host_copy_that_can_be_pulled(backend: Backend) -> None:
    from trinity_mq.sync.channels.receiver import WeightReceiver as AnyReceiver

    channel = CollectiveChannel("127.0.0.1", BUCKET, 30.0, backend, MemoryChannel("127.0.0.1", BUCKET, 30.0))
    source = weights("cuda")
    for step in (1, 2):
        where = await channel.offer((1, step), source, MANIFEST)
        assert where["backend"] == backend
        await channel.broadcast(source, MANIFEST, 1, step, 1)
        await channel.committed((1, step), source, MANIFEST)
    found = await channel.catch_up_source()
    assert found is not None
    version, place, manifest = found
    assert version == (1, 2)
    spec = {**place, "manifest": manifest, "seconds": 30.0}
    arrived = await AnyReceiver().receive(spec)
    assert all(torch.equal(arrived[name], tensor.cpu()) for name, tensor in source)
    await channel.close()


async def test_a_peer_that_does_not_come_costs_one_deadline() -> None:
    sender = Sender("127.0.0.1", BUCKET, 2.0, "nccl")
    await sender.rendezvous()
    with pytest.raises(ChannelError):
        await sender.broadcast(weights("cuda"), MANIFEST, 1, 1, 2)
    again = Sender("127.0.0.1", BUCKET, 30.0, "nccl")  # and the process can open another group
    await again.rendezvous()
    await again.broadcast(weights("cuda"), MANIFEST, 1, 1, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes each GPU once")
async def test_two_gpus_carry_weights_from_one_to_the_other() -> None:
    sender, receiver = Sender("127.0.0.1", BUCKET, 30.0, "nccl"), Receiver()
    common = {"epoch": 1, "attempt": 1, "rank": 1, "world": 2, "seconds": 30.0, "manifest": MANIFEST}
    spec: dict[str, Any] = {**await sender.rendezvous(), **common}

    def receive() -> dict[str, torch.Tensor]:
        torch.cuda.set_device(1)
        return receiver.receive_blocking(spec)

    arrived, _ = await asyncio.gather(
        asyncio.to_thread(receive), sender.broadcast(weights("cuda:0"), MANIFEST, 1, 1, 2)
    )
    assert all(torch.equal(arrived[name].cpu(), tensor.cpu()) for name, tensor in weights("cpu"))


def test_host_copies_are_on_the_host() -> None:
    copy = HostCopy((1, 1), MANIFEST, BUCKET).take(weights("cuda"), digests=True)
    assert {flat.device.type for flat in copy.flats} == {"cpu"}
