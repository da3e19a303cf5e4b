"""Weights for several workers of one engine, here threads: one copy for all, and all stay in step after a failure."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.collective.broadcast import Sender
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.testing.tcp_proxy import FaultProxy

from .weights import BUCKET, manifest_of, same, some_weights, spec_of

COUNT = 3
TENSORS = some_weights(1)
MANIFEST = manifest_of(TENSORS)


class Step:
    """What the workers have in common."""

    def __init__(self) -> None:
        self.value: Any = None
        self.turnstile = threading.Barrier(COUNT, timeout=20.0)


@dataclass
class Worker:
    """One of the workers, by threads instead of processes."""

    number: int
    step: Step

    def broadcast(self, value: Any) -> Any:
        if self.number == 0:
            self.step.value = value
        self.barrier()
        given = self.step.value
        self.barrier()
        return given

    def barrier(self) -> None:
        self.step.turnstile.wait()


class Workers:
    """All of them, each with its receiver."""

    def __init__(self) -> None:
        step = Step()
        self.all = [(Worker(number, step), WeightReceiver()) for number in range(COUNT)]

    async def receive(self, spec: dict[str, Any]) -> list[dict[str, Tensor] | BaseException]:
        """Return what each worker received, or its error."""

        def received(worker: Worker, receiver: WeightReceiver) -> dict[str, Tensor]:
            return receiver.receive_blocking({**spec, "rank": spec["rank"] + worker.number}, worker)

        calls = [asyncio.to_thread(received, *each) for each in self.all]
        return await asyncio.gather(*calls, return_exceptions=True)


def shared_memory() -> Iterator[str]:
    """Yield the open and mapped memory of weights in this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "memfd:weights" in target:
            yield target
    yield from (line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weights" in line)


async def test_one_fetch_serves_all_workers_and_its_memory_is_given_back() -> None:
    channel, workers = MemoryChannel("127.0.0.1", BUCKET, 20.0), Workers()
    try:
        for step in (1, 2):
            tensors = some_weights(step)
            where = await channel.offer((1, step), tensors, MANIFEST)
            async with FaultProxy(where["url"]) as proxy:
                clients = set[int]()
                proxy.refuses = lambda port, clients=clients: clients.add(port) is not None  # type: ignore[misc]
                arrived = await workers.receive(spec_of({**where, "url": proxy.url}, MANIFEST, rank=1))
            assert len(clients) == 1
            assert all(isinstance(each, dict) and same(each, tensors) for each in arrived)
        assert sum("memfd:weights" in held for held in shared_memory())
        del arrived
        await asyncio.sleep(0)  # the future that this task has waited for holds them too
        gc.collect()
        assert not list(shared_memory())
    finally:
        await channel.close()


async def test_each_worker_is_a_rank_of_a_broadcast_of_which_one_copy_is_kept() -> None:
    sender, workers = Sender("127.0.0.1", BUCKET, 20.0), Workers()
    for attempt in (1, 2):  # the second by the same group
        tensors = some_weights(attempt)
        common = {"epoch": 1, "attempt": attempt, "rank": 1, "world": 1 + COUNT}
        spec = spec_of(await sender.rendezvous(), MANIFEST, **common)
        arrived, _ = await asyncio.gather(
            workers.receive(spec), sender.broadcast(tensors, MANIFEST, 1, attempt, 1 + COUNT)
        )
        assert all(isinstance(each, dict) and same(each, tensors) for each in arrived)


async def test_a_fetch_that_fails_fails_for_all_workers_and_the_next_one_works() -> None:
    channel, workers = MemoryChannel("127.0.0.1", BUCKET, 20.0), Workers()
    try:
        where = await channel.offer((1, 1), TENSORS, MANIFEST)
        for each in await workers.receive(spec_of({**where, "token": "guessed"}, MANIFEST, rank=1)):
            with pytest.raises(ChannelError, match="401"):
                raise each if isinstance(each, BaseException) else AssertionError(each)
        for each in await workers.receive(spec_of(where, MANIFEST, rank=1)):
            assert isinstance(each, dict)
            assert same(each, TENSORS)
    finally:
        await channel.close()
