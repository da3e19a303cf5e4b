"""What all channels have in common: every bit arrives, once committed a version can be pulled, and the live weights do
not matter any more.
"""

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

from trinity_mq.config import Config, SyncConfig, load_config
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.messages import Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.errors import FatalError
from trinity_mq.sync.channels.base import Channel, ChannelError
from trinity_mq.sync.channels.factory import open_channel, weights_folder
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.training.model.policy import Policy

from .weights import manifest_of, pull, same, send, some_weights, spec_of

WAYS = {
    "collective": {"sync_method": "collective"},
    "collective, files": {"sync_method": "collective", "pull": "checkpoint"},
    "memory": {"sync_method": "memory"},
    "checkpoint": {"sync_method": "checkpoint"},
}


def config(folder: Path, **sync: object) -> Config:
    settings = {"bucket_bytes": 4096, "sync_timeout": 20.0, **sync}
    return load_config({"model": {"tiny": {}}, "name": "run-a", "run_dir": str(folder), "synchronizer": settings})


@pytest.fixture(params=WAYS)
async def channel(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Channel]:
    opened = open_channel(config(tmp_path, **WAYS[request.param]))
    yield opened
    await opened.close()


async def test_every_bit_arrives_and_can_be_pulled_whatever_happens_to_the_live_weights(channel: Channel) -> None:
    receiver = WeightReceiver()
    assert await channel.catch_up_source() is None
    for step in (1, 2):
        tensors, kept = some_weights(step), some_weights(step)
        assert same(await send(channel, receiver, (1, step), tensors, step), kept)
        for _, tensor in tensors:
            tensor.zero_()
        version, arrived = await pull(channel, WeightReceiver())
        assert version == (1, step)
        assert same(arrived, kept)


async def test_what_was_offered_and_not_committed_is_not_pulled(channel: Channel) -> None:
    old, new = some_weights(1), some_weights(2)
    await send(channel, WeightReceiver(), (1, 1), old, 1)
    await channel.offer((1, 2), new, manifest_of(new))
    channel.abandon()
    version, arrived = await pull(channel, WeightReceiver())
    assert version == (1, 1)
    assert same(arrived, old)
    assert same(await send(channel, WeightReceiver(), (1, 2), new, 2), new)  # and the next try of it goes through
    assert (await pull(channel, WeightReceiver()))[0] == (1, 2)


async def test_a_second_try_of_a_version_stages_nothing_again(tmp_path: Path) -> None:
    for method in ("memory", "checkpoint"):
        channel = open_channel(config(tmp_path, sync_method=method))
        tensors = some_weights(1)
        first = await channel.offer((1, 1), tensors, manifest_of(tensors))
        changed = [(name, tensor + 1) for name, tensor in tensors]
        assert await channel.offer((1, 1), changed, manifest_of(tensors)) == first
        arrived = await WeightReceiver().receive(spec_of(first, manifest_of(tensors)))
        assert same(arrived, tensors)
        await channel.close()


def places(arrived: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in arrived.values() if tensor.numel()}


@pytest.mark.parametrize("method", ["collective", "memory"])
async def test_an_engine_fills_its_buffers_again_but_never_those_of_a_transfer_that_failed(
    tmp_path: Path, method: str
) -> None:
    channel, receiver = open_channel(config(tmp_path, sync_method=method)), WeightReceiver()
    first = await send(channel, receiver, (1, 1), some_weights(1), 1)
    again = await send(channel, receiver, (1, 2), some_weights(2), 1)
    assert places(again) == places(first)
    where = await channel.offer((1, 3), some_weights(3), manifest_of(some_weights(3)))
    with pytest.raises(ChannelError):  # nobody broadcasts, or nobody is there who streams
        await receiver.receive(
            spec_of({**where, "url": "http://127.0.0.1:9"}, manifest_of(some_weights(3)), 9, seconds=1.0)
        )
    channel.abandon()
    after = await send(channel, receiver, (1, 3), some_weights(3), 2)
    assert not places(after) & places(again)
    await channel.close()


async def test_a_method_that_an_engine_does_not_know_is_an_error_that_says_so() -> None:
    with pytest.raises(ChannelError, match="by 'pigeon', which this engine does not know"):
        await WeightReceiver().receive(spec_of({"method": "pigeon"}, []))
    with pytest.raises(ChannelError, match="by 'pigeon'"):
        WeightReceiver().receive_blocking(spec_of({"method": "pigeon"}, []))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_ends_the_trainer_at_once(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="this process has no GPU or a torch without NCCL"):
        open_channel(config(tmp_path, sync_method="collective", backend="nccl"))


def test_names_of_the_reference_are_taken() -> None:
    sync = SyncConfig.model_validate({"sync_method": "nccl"})
    assert (sync.sync_method, sync.backend) == ("collective", "nccl")
    with pytest.raises(ValueError, match="sync_method is 'nccl', but backend is 'gloo'"):
        SyncConfig.model_validate({"sync_method": "nccl", "backend": "gloo"})


def test_a_pull_from_elsewhere_than_the_method_is_refused() -> None:
    with pytest.raises(ValueError, match="pull is 'memory', but weights travel by checkpoint"):
        SyncConfig(sync_method="checkpoint", pull="memory")
    assert SyncConfig().pull_method == "memory"
    assert SyncConfig(sync_method="checkpoint").pull_method == "checkpoint"


def test_runs_that_share_a_place_have_folders_of_their_own(tmp_path: Path) -> None:
    assert weights_folder(config(tmp_path)) == str(tmp_path / "weights")
    assert weights_folder(config(tmp_path, checkpoint_path=f"{tmp_path}/shared/")) == str(tmp_path / "shared/run-a")
    assert weights_folder(config(tmp_path, checkpoint_path="memory://w")) == "memory://w/run-a"


def test_a_url_that_nothing_opens_is_fatal_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="no library opens 'nosuch://w/run-a'"):
        open_channel(config(tmp_path, sync_method="checkpoint", checkpoint_path="nosuch://w"))


pytestmark = pytest.mark.timeout(180)  # an engine's start takes most of it

CANARY = [3, 7, 2, 9, 4]
NAME = "model.norm.weight"
METHODS = (
    {"sync_method": "collective"},
    {"sync_method": "memory"},
    {"sync_method": "checkpoint"},
    {"sync_method": "collective", "pull": "checkpoint"},
)


def engine_config(folder: Path, **sync: object) -> Config:
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
    engine = EngineHost(engine_config(tmp_path), tmp_path, "e0")
    await engine.start()
    yield engine
    await engine.stop()


class Trainer:
    """A policy whose weights change with each version, and a channel."""

    def __init__(self, folder: Path) -> None:
        settings = engine_config(folder)
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
        channel = open_channel(engine_config(tmp_path, **method))
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
