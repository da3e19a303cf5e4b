"""Weights for tests of channels, and both ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import Channel, Manifest, Tensors
from trinity_mq.sync.channels.receiver import WeightReceiver

BUCKET = 4096


def some_weights(seed: int) -> Tensors:
    """Return tensors of several dtypes and shapes, some over a bucket's size, one empty."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        ("embed", random(70, 50)),
        ("norm", random(50)),
        ("half", random(40, 33).bfloat16()),
        ("empty", torch.empty(0, 3)),
        ("count", torch.randint(0, 99, (7,), generator=generator)),
        ("head", random(50, 70).T),
        ("last", random(1)),
    ]


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    return [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors]


def same(arrived: dict[str, Tensor], tensors: Tensors) -> bool:
    """Say whether names, dtypes, shapes and values are the same."""
    return sorted(arrived) == sorted(name for name, _ in tensors) and all(
        arrived[name].dtype == one.dtype and torch.equal(arrived[name], one) for name, one in tensors
    )


def spec_of(where: dict[str, Any], manifest: Manifest, attempt: int = 1, **more: Any) -> dict[str, Any]:
    """Return what an engine is told, as it comes out of JSON."""
    entries = [list(entry) for entry in manifest]
    common = {"epoch": attempt, "attempt": attempt, "rank": 1, "world": 2, "seconds": 20.0, "manifest": entries}
    return {**where, **common, **more}


async def send(
    channel: Channel, receiver: WeightReceiver, version: Version, tensors: Tensors, attempt: int
) -> dict[str, Tensor]:
    """Carry one version to one engine and commit it."""
    manifest = manifest_of(tensors)
    where = await channel.offer(version, tensors, manifest)
    async with asyncio.TaskGroup() as group:
        receiving = group.create_task(receiver.receive(spec_of(where, manifest, attempt)))
        group.create_task(channel.broadcast(tensors, manifest, attempt, attempt, 2))
    await channel.committed(version, tensors, manifest)
    return receiving.result()


async def pull(channel: Channel, receiver: WeightReceiver) -> tuple[Version, dict[str, Tensor]]:
    """Fetch the committed version as one engine alone."""
    found = await channel.catch_up_source()
    assert found is not None
    version, where, manifest = found
    return version, await receiver.receive(spec_of(where, manifest, epoch=0))
