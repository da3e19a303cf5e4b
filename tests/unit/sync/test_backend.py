"""What carries the broadcast, and what is said where it cannot."""

from __future__ import annotations

import asyncio

import pytest
import torch

from trinity_mq.sync.channels.base import ChannelError, ManifestEntry
from trinity_mq.sync.channels.buckets import SpareBuffers
from trinity_mq.sync.channels.collective.broadcast import Receiver, Sender

MANIFEST: list[ManifestEntry] = [("a", "float32", [3]), ("b", "float32", [2, 2])]
TENSORS = [("a", torch.arange(3.0)), ("b", torch.full((2, 2), 0.5))]


async def spec_of(sender: Sender, epoch: int = 1) -> dict[str, object]:
    common = {"epoch": epoch, "attempt": 1, "rank": 1, "world": 2, "seconds": 10.0, "manifest": MANIFEST}
    return {**await sender.rendezvous(), **common}


async def test_a_thread_without_an_event_loop_receives_too_and_keeps_its_group() -> None:
    sender, receiver = Sender("127.0.0.1", 1024, 10.0), Receiver()
    for _ in range(2):
        spec = await spec_of(sender)
        arrived, _ = await asyncio.gather(
            asyncio.to_thread(receiver.receive_blocking, spec), sender.broadcast(TENSORS, MANIFEST, 1, 1, 2)
        )
        assert arrived.keys() == dict(TENSORS).keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in TENSORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is about there being no GPU")
async def test_nccl_without_a_gpu_is_an_error_that_says_so_on_both_sides() -> None:
    sender = Sender("127.0.0.1", 1024, 5.0, "nccl")
    spec = await spec_of(sender)
    assert spec["backend"] == "nccl"
    results = await asyncio.gather(
        Receiver().receive(spec, SpareBuffers()), sender.broadcast(TENSORS, MANIFEST, 1, 1, 2), return_exceptions=True
    )
    for error in results:
        assert isinstance(error, ChannelError)
        assert "has no GPU" in str(error)
