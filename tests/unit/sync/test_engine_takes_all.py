"""A real engine process, of our own kind, takes weights by every channel, and pulls; what fails touches nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from trinity_mq.config import Config, load_config
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.messages import Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.training.model.policy import Policy

from .weights import spec_of

pytestmark = pytest.mark.timeout(180)  # an engine's start takes most of it

CANARY = [3, 7, 2, 9, 4]
NAME = "model.norm.weight"
METHODS = (
    {"sync_method": "collective"},
    {"sync_method": "memory"},
    {"sync_method": "checkpoint"},
    {"sync_method": "collective", "pull": "checkpoint"},
)


def config(folder: Path, **sync: object) -> Config:
    return load_config(
        {
            "model": {"tiny": {}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 8},
            "run_dir": str(folder),
            "synchronizer": {"bucket_bytes": 65536, "sync_timeout": 20.0, **sync},
        }
    )


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineHost]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    engine = EngineHost(config(tmp_path), tmp_path, "e0")
    await engine.start()
    yield engine
    await engine.stop()


class Trainer:
    """A policy whose weights change with each version, and a channel."""

    def __init__(self, folder: Path) -> None:
        settings = config(folder)
        self.policy = Policy(settings.model, ensure_model_folder(settings.model, folder / "model", 0), 0)

    def step(self) -> None:
        with torch.no_grad():
            for _, tensor in self.policy.model.named_parameters():
                tensor.add_(torch.randn_like(tensor) * 0.02)

    async def sync(self, channel: Channel, host: EngineHost, version: Version) -> dict[str, Any]:
        tensors, manifest = self.policy.weights(), self.policy.manifest()
        where = await channel.offer(version, tensors, manifest)
        await host.pause()
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(host.receive(self.spec(where, version, version[1])))
            group.create_task(channel.broadcast(tensors, manifest, version[1], version[1], 2))
        await host.commit(version, version[1])
        await channel.committed(version, tensors, manifest)
        return receiving.result()

    def spec(self, where: dict[str, Any], version: Version, attempt: int = 1) -> dict[str, Any]:
        canary = {"tokens": CANARY}
        return spec_of(where, self.policy.manifest(), attempt, version=list(version), canary=canary)

    async def agrees(self, host: EngineHost, canary: dict[str, Any]) -> None:
        assert canary["logprobs"] == pytest.approx(self.policy.sequence_logprobs(CANARY), abs=1e-5)
        assert torch.equal(load(await host.weight(NAME))[NAME], dict(self.policy.weights())[NAME])


async def test_every_channel_and_every_pull(host: EngineHost, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step, method in enumerate(METHODS, 1):
        channel = open_channel(config(tmp_path, **method))
        trainer.step()
        await trainer.agrees(host, await trainer.sync(channel, host, (1, step)))
        # as an engine that came late does, at any time after
        found = await channel.catch_up_source()
        assert found is not None
        version, where, _ = found
        await host.pause()
        canary = await host.receive(trainer.spec(where, version))
        await host.commit(version, step)
        await trainer.agrees(host, canary)
        assert host.snapshot.version == (1, step)
        await channel.close()


async def test_damaged_weights_leave_the_old_ones_serving(host: EngineHost, tmp_path: Path) -> None:
    trainer, channel = Trainer(tmp_path), MemoryChannel("127.0.0.1", 65536, 20.0)
    old = await trainer.sync(channel, host, (1, 1))
    trainer.step()
    copy = await channel.stage((1, 2), trainer.policy.weights(), trainer.policy.manifest(), digests=True)
    where = await channel.offer((1, 2), trainer.policy.weights(), trainer.policy.manifest())
    copy.flats[-1][0] += 1
    await host.pause()
    with pytest.raises(ReceiveFailed, match="checksum") as failed:
        await host.receive(trainer.spec(where, (1, 2)))
    assert not failed.value.touched
    await host.resume()
    found = await channel.catch_up_source()
    assert found is not None
    version, where, _ = found
    assert version == (1, 1)
    await host.pause()
    again = await host.receive(trainer.spec(where, version))
    assert again["logprobs"] == old["logprobs"]
    await host.commit(version, 1)
    await channel.close()
