"""The collective channel over real gloo between two processes, and flat buckets."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import (
    HashStore,  # type: ignore[attr-defined]  # public, but not declared as exported
)

from trinity_mq.sync.channels.base import ChannelError, ManifestEntry
from trinity_mq.sync.channels.collective.broadcast import Group, Receiver, Sender

CHILD = """
import asyncio, json, sys
from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import SpareBuffers
from trinity_mq.sync.channels.collective.broadcast import Receiver
async def main():
    receiver = Receiver()
    for line in sys.stdin:
        try:
            tensors, _ = await receiver.receive(json.loads(line), SpareBuffers())
            found = {name: [str(t.dtype), list(t.shape), t.double().sum().item()] for name, t in tensors.items()}
            print(json.dumps(found), flush=True)
        except ChannelError as error:
            print(json.dumps({"error": str(error)}), flush=True)
asyncio.run(main())
"""
TENSORS = [("a", torch.arange(100.0)), ("b", torch.full((3, 400), 0.5, dtype=torch.bfloat16)), ("c", torch.tensor(7.0))]
MANIFEST = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in TENSORS]


async def child() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )


async def test_broadcast_keeps_its_group_and_a_dead_peer_costs_one_deadline() -> None:
    sender = Sender("127.0.0.1", 1000, 3.0)
    rendezvous = await sender.rendezvous()
    process = await child()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for attempt in (1, 2):
            spec = {
                **rendezvous,
                "epoch": 1,
                "attempt": attempt,
                "rank": 1,
                "world": 2,
                "seconds": 20.0,
                "manifest": MANIFEST,
            }
            sender.seconds = 20.0
            process.stdin.write((json.dumps(spec) + "\n").encode())
            await process.stdin.drain()
            await sender.broadcast(TENSORS, MANIFEST, 1, attempt, 2)
            got = json.loads(await process.stdout.readline())
            assert got["a"] == ["torch.float32", [100], 4950.0]
            assert got["b"] == ["torch.bfloat16", [3, 400], 600.0]
    finally:
        process.kill()
        await process.wait()
    sender.seconds = 2.0
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(ChannelError):
        await sender.broadcast(TENSORS, MANIFEST, 2, 3, 2)
    assert loop.time() - started < 4.0
    with pytest.raises(ChannelError, match="no rendezvous"):
        await sender.broadcast(TENSORS, MANIFEST, 2, 4, 2)


def test_store_keeps_the_keys_of_one_barrier() -> None:
    store = HashStore()
    groups = [Group(store, 1, rank, 3, 20.0) for rank in range(3)]
    counts = []
    with ThreadPoolExecutor(3) as pool:
        for attempt in range(1, 6):
            list(pool.map(lambda group, number=attempt: group.barrier(number), groups))
            counts.append(store.num_keys())
    assert counts == [3] * 5


PAIRS_MANIFEST: list[ManifestEntry] = [("a", "float32", [3]), ("b", "float32", [2, 2])]
PAIR = [("a", torch.arange(3.0)), ("b", torch.full((2, 2), 0.5))]


async def spec_of(sender: Sender, epoch: int = 1) -> dict[str, object]:
    common = {"epoch": epoch, "attempt": 1, "rank": 1, "world": 2, "seconds": 10.0, "manifest": PAIRS_MANIFEST}
    return {**await sender.rendezvous(), **common}


async def test_a_thread_without_an_event_loop_receives_too_and_keeps_its_group() -> None:
    sender, receiver = Sender("127.0.0.1", 1024, 10.0), Receiver()
    for _ in range(2):
        spec = await spec_of(sender)
        arrived, _ = await asyncio.gather(
            asyncio.to_thread(receiver.receive_blocking, spec), sender.broadcast(PAIR, PAIRS_MANIFEST, 1, 1, 2)
        )
        assert arrived.keys() == dict(PAIR).keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in PAIR)
