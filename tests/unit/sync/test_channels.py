"""Weights over HTTP: who may read them, what damage and broken connections cost, and what memory is given back. And
weights as files: whole or not there, verified by whoever reads, old ones removed and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
import torch
from safetensors.torch import load, load_file
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.config import Config, SyncConfig, load_config
from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.messages import Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.errors import FatalError
from trinity_mq.sync.channels.base import Channel, ChannelError
from trinity_mq.sync.channels.buckets import digest, raw
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.checkpoint.files import MANIFEST as MANIFEST_FILE
from trinity_mq.sync.channels.factory import open_channel, weights_folder
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.testing.tcp_proxy import FaultProxy
from trinity_mq.training.model.policy import Policy

from .weights import BUCKET, manifest_of, pull, same, send, some_weights, spec_of

TENSORS = some_weights(1)
MANIFEST = manifest_of(TENSORS)


@pytest.fixture
async def channel() -> AsyncIterator[MemoryChannel]:
    opened = MemoryChannel("127.0.0.1", BUCKET, 20.0)
    yield opened
    await opened.close()


async def receive(where: dict[str, Any], **more: Any) -> Any:
    return await WeightReceiver().receive(spec_of(where, MANIFEST, **more))


async def test_odd_requests_are_answered_and_harm_nobody(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    headers = {"Authorization": f"Bearer {where['token']}"}
    async with aiohttp.ClientSession() as session:
        for path in ("999999999", "9" * 5000, "-1", "0/../../secret", "%00", ""):
            async with session.get(f"{where['url']}/{path}", headers=headers) as answer:
                assert answer.status in {404, 400}, path
        async with session.get(f"{where['url']}/0") as answer:
            assert answer.status == 401, "without the token nobody reads"
        async with session.get(where["url"].replace("1.1", "1.2"), headers=headers) as answer:
            assert answer.status == 404
    assert same(await receive(where), TENSORS)


async def test_a_version_let_go_says_what_there_is(channel: MemoryChannel) -> None:
    first = await channel.offer((1, 1), TENSORS, MANIFEST)
    await channel.committed((1, 1), TENSORS, MANIFEST)
    await channel.offer((1, 2), TENSORS, MANIFEST)
    assert same(await receive(first), TENSORS)  # still there while the next one is under way
    await channel.committed((1, 2), TENSORS, MANIFEST)
    with pytest.raises(ChannelError, match=r"404, version 1\.1 is not available; available: 1\.2 in \d+ buckets"):
        await receive(first)


async def test_two_versions_of_memory_are_all_it_takes(channel: MemoryChannel) -> None:
    receiver = WeightReceiver()
    buckets = sum(1 for bucket in HostCopy((0, 0), MANIFEST, BUCKET).buckets if bucket.num_elements)
    places = set()
    for step in range(1, 7):
        tensors = some_weights(step)
        copy = await channel.stage((1, step), tensors, MANIFEST, digests=True)
        assert same(await send(channel, receiver, (1, step), tensors, step), tensors)
        places |= {flat.data_ptr() for flat in copy.flats if flat.numel()}
    assert len(places) == 2 * buckets


async def test_what_somebody_reads_is_not_written_over() -> None:
    channel = MemoryChannel("127.0.0.1", 2**26, 30.0)
    versions = [[("big", torch.full((2**23,), float(step)))] for step in range(5)]  # more than a socket holds
    manifest = manifest_of(versions[0])
    where = await channel.offer((1, 0), versions[0], manifest)
    headers = {"Authorization": f"Bearer {where['token']}"}
    try:
        async with aiohttp.ClientSession(read_bufsize=2**10) as session:
            async with session.get(f"{where['url']}/0", headers=headers) as answer:
                for step in range(5):
                    await channel.offer((1, step), versions[step], manifest)
                    await channel.committed((1, step), versions[step], manifest)
                body = await answer.read()
        assert body == raw(versions[0][0][1]).tobytes()
    finally:
        await channel.close()


async def test_other_weights_than_the_manifests_are_refused(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    with pytest.raises(ChannelError, match="checksums for 1 buckets"):
        await WeightReceiver().receive(spec_of(where, [("a", "float32", [3])]))
    wider = [(name, "float64" if name == "last" else dtype, shape) for name, dtype, shape in MANIFEST]
    with pytest.raises(ChannelError, match=r"bytes, the manifest of the sync says"):
        await WeightReceiver().receive(spec_of(where, wider))


async def test_a_connection_that_breaks_is_opened_again(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    async with FaultProxy(where["url"]) as proxy:
        proxy.hold_replies()
        receiving = asyncio.create_task(receive({**where, "url": proxy.url}))
        await until(lambda: bool(proxy.clients))
        proxy.cut()
        assert same(await receiving, TENSORS)


async def test_a_trainer_that_stays_silent_costs_the_deadline(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    async with FaultProxy(where["url"]) as proxy:
        proxy.hold_replies()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(ChannelError):
            await receive({**where, "url": proxy.url}, seconds=1.0)
        assert loop.time() - started < 10.0


async def test_a_trainer_that_is_gone_is_named(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    await channel.close()
    with pytest.raises(ChannelError, match=r"the checksums of http:.* did not arrive in 3 tries: ConnectionRefu"):
        await receive(where)


async def test_an_address_of_another_machine_is_an_error_that_says_what_to_set() -> None:
    channel = MemoryChannel("192.0.2.1", BUCKET, 20.0)  # an address of documentation, nobody's
    with pytest.raises(ChannelError, match=r"synchronizer\.host 192\.0\.2\.1"):
        await channel.offer((1, 1), TENSORS, MANIFEST)


async def test_a_reader_that_stands_still_is_cut_off() -> None:
    channel = MemoryChannel("127.0.0.1", 2**26, 0.5)
    big = [("big", torch.zeros(2**23))]  # more than a socket holds
    where = await channel.offer((1, 1), big, manifest_of(big))
    headers = {"Authorization": f"Bearer {where['token']}"}
    try:
        async with aiohttp.ClientSession(read_bufsize=2**10) as session:
            with capture_logs() as logged:
                async with session.get(f"{where['url']}/0", headers=headers) as answer:
                    assert answer.status == 200
                    await until(lambda: any(entry["event"] == "weights_not_read" for entry in logged))
                    with pytest.raises(aiohttp.ClientError):
                        await answer.read()
    finally:
        await channel.close()


def channel_in(root: Path | str, keep: int = 2) -> CheckpointChannel:
    return CheckpointChannel(str(root), BUCKET, 20.0, keep=keep)


def versions(root: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in root.iterdir())


async def test_any_reader_of_safetensors_understands_a_shard(tmp_path: Path) -> None:
    where = await channel_in(tmp_path).offer((3, 7), TENSORS, MANIFEST)
    found: dict[str, torch.Tensor] = {}
    names = json.loads((Path(where["path"]) / MANIFEST_FILE).read_text())
    assert names["version"] == [3, 7]
    for shard in names["shards"]:
        file = Path(where["path"]) / shard["name"]
        assert file.stat().st_size == shard["bytes"]
        found |= load_file(file)
    assert same(found, TENSORS)
    assert len(names["shards"]) > 3


async def test_weights_in_an_object_store(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}/weights"
    channel = channel_in(root)
    for step in (1, 2, 3, 4):
        tensors = some_weights(step)
        assert same(await send(channel, WeightReceiver(), (1, step), tensors, step), tensors)
    kept = [path.rpartition("/")[2].partition("-")[0] for path in fsspec.filesystem("memory").ls(root, detail=False)]
    assert sorted(kept) == ["1.3", "1.4"]


async def test_the_newest_stay_and_nothing_of_others_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "9.9-notes").write_text("not weights")
    (tmp_path / "1.0-0123abcd").mkdir()  # of a trainer that was killed while writing: no manifest
    (tmp_path / "1.0-0123abcd" / ".shard-00000.safetensors.part").write_bytes(b"half")
    for generation in (1, 2):  # a restart begins with what it finds
        channel = channel_in(tmp_path)
        for step in (2, 9, 10):
            await send(channel, WeightReceiver(), (generation, step), some_weights(step), 1)
    assert versions(tmp_path) == ["2.10", "2.9", "9.9", "mine"]


async def test_of_several_tries_only_the_committed_one_stays(tmp_path: Path) -> None:
    for keep in (1, 2):
        channel = channel_in(tmp_path, keep)
        for step in (1, 2, 3):
            for _ in range(3):
                await channel.offer((keep, step), TENSORS, MANIFEST)
                channel.abandon()
            await send(channel, WeightReceiver(), (keep, step), TENSORS, 1)
            found = await channel.catch_up_source()
            assert found is not None
            assert Path(found[1]["path"]).is_dir()
        assert versions(tmp_path) == [f"{keep}.{step}" for step in range(4 - keep, 4)]


async def test_files_that_a_try_could_not_use_are_written_anew(tmp_path: Path) -> None:
    channel = channel_in(tmp_path)
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    flip(Path(where["path"]) / "shard-00001.safetensors", -1)
    with pytest.raises(ChannelError, match="checksum"):
        await receive(where)
    channel.abandon()
    assert same(await send(channel, WeightReceiver(), (1, 1), TENSORS, 2), TENSORS)


async def test_what_a_member_reads_survives_the_next_version(tmp_path: Path) -> None:
    channel = channel_in(tmp_path, keep=1)
    arrived = await send(channel, WeightReceiver(), (1, 1), TENSORS, 1)
    await send(channel, WeightReceiver(), (1, 2), some_weights(2), 2)
    assert versions(tmp_path) == ["1.2"]
    assert same(arrived, TENSORS)  # mapped from files that have no name any more


def flip(path: Path, at: int) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)


async def test_damage_is_found_before_anything_is_taken_in(tmp_path: Path) -> None:
    for harm, said in (
        (lambda path: flip(path / "shard-00001.safetensors", -1), r"shard-00001\.safetensors cannot be used: .*checks"),
        (lambda path: flip(path / MANIFEST_FILE, 5), r"manifest\.json cannot be used: .*checksum"),
        (
            lambda path: (path / "shard-00002.safetensors").unlink(),
            r"shard-00002\.safetensors cannot be used: FileNotF",
        ),
        (lambda path: (path / "shard-00000.safetensors").write_bytes(b""), r"shard-00000\.safetensors cannot be used"),
        (lambda path: (path / MANIFEST_FILE).unlink(), r"manifest\.json cannot be used: FileNotFound"),
    ):
        where = await channel_in(tmp_path).offer((1, 1), TENSORS, MANIFEST)
        harm(Path(where["path"]))
        with pytest.raises(ChannelError, match=said):
            await receive(where)


async def test_files_of_other_weights_are_refused(tmp_path: Path) -> None:
    where = await channel_in(tmp_path).offer((1, 1), TENSORS, MANIFEST)
    wider = [(name, "float64" if name == "last" else dtype, shape) for name, dtype, shape in MANIFEST]
    with pytest.raises(ChannelError, match=r"'last' is .*float32.*, the manifest of the sync says .*float64"):
        await WeightReceiver().receive(spec_of(where, wider))
    with pytest.raises(ChannelError, match=r"'last' is .*the manifest of the sync says None"):
        await WeightReceiver().receive(spec_of(where, MANIFEST[:-1]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"shards": [{"name": "../secret.safetensors", "xxh3_128": ""}]},
            r"'\.\./secret\.safetensors' is not the name of a shard",
        ),
        (
            {"format": 2, "shards": "of another form"},
            r"manifest\.json has format 2, this release reads 1: run trainer and engines",
        ),
    ],
    ids=["a name that leads elsewhere", "a format of a newer release"],
)
async def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    body = json.dumps(content).encode()
    (tmp_path / MANIFEST_FILE).write_bytes(body)
    with pytest.raises(ChannelError, match=said):
        await receive({"method": "checkpoint", "path": str(tmp_path), "digest": digest(body)})


async def test_a_place_that_cannot_be_written_says_where_and_what_to_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ChannelError, match=r"version \(1, 1\) cannot be written below .*file: .*checkpoint_path"):
        await channel_in(tmp_path / "file").offer((1, 1), TENSORS, MANIFEST)


async def test_a_write_that_fails_half_way_leaves_no_version_and_the_next_try_works(tmp_path: Path) -> None:
    channel = channel_in(tmp_path)
    with pytest.raises(ChannelError, match="the order of their manifest"):
        await channel.offer((1, 1), TENSORS[:-1], MANIFEST)
    [left] = tmp_path.iterdir()
    assert not (left / MANIFEST_FILE).exists()
    assert same(await send(channel, WeightReceiver(), (1, 1), TENSORS, 1), TENSORS)
    assert not left.exists()


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
async def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Channel]:
    opened = open_channel(config(tmp_path, **WAYS[request.param]))
    yield opened
    await opened.close()


async def test_every_bit_arrives_and_can_be_pulled_whatever_happens_to_the_live_weights(
    carrier: Channel,
) -> None:
    receiver = WeightReceiver()
    assert await carrier.catch_up_source() is None
    for step in (1, 2):
        tensors, kept = some_weights(step), some_weights(step)
        assert same(await send(carrier, receiver, (1, step), tensors, step), kept)
        for _, tensor in tensors:
            tensor.zero_()
        version, arrived = await pull(carrier, WeightReceiver())
        assert version == (1, step)
        assert same(arrived, kept)


async def test_what_was_offered_and_not_committed_is_not_pulled(carrier: Channel) -> None:
    old, new = some_weights(1), some_weights(2)
    await send(carrier, WeightReceiver(), (1, 1), old, 1)
    await carrier.offer((1, 2), new, manifest_of(new))
    carrier.abandon()
    version, arrived = await pull(carrier, WeightReceiver())
    assert version == (1, 1)
    assert same(arrived, old)
    assert same(await send(carrier, WeightReceiver(), (1, 2), new, 2), new)  # and the next try of it goes through
    assert (await pull(carrier, WeightReceiver()))[0] == (1, 2)


async def test_a_second_try_of_a_version_stages_nothing_again(tmp_path: Path) -> None:
    for method in ("memory", "checkpoint"):
        carrier = open_channel(config(tmp_path, sync_method=method))
        tensors = some_weights(1)
        first = await carrier.offer((1, 1), tensors, manifest_of(tensors))
        changed = [(name, tensor + 1) for name, tensor in tensors]
        assert await carrier.offer((1, 1), changed, manifest_of(tensors)) == first
        arrived = await WeightReceiver().receive(spec_of(first, manifest_of(tensors)))
        assert same(arrived, tensors)
        await carrier.close()


def places(arrived: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in arrived.values() if tensor.numel()}


@pytest.mark.parametrize("method", ["collective", "memory"])
async def test_an_engine_fills_its_buffers_again_but_never_those_of_a_transfer_that_failed(
    tmp_path: Path, method: str
) -> None:
    carrier, receiver = open_channel(config(tmp_path, sync_method=method)), WeightReceiver()
    first = await send(carrier, receiver, (1, 1), some_weights(1), 1)
    again = await send(carrier, receiver, (1, 2), some_weights(2), 1)
    assert places(again) == places(first)
    where = await carrier.offer((1, 3), some_weights(3), manifest_of(some_weights(3)))
    with pytest.raises(ChannelError):  # nobody broadcasts, or nobody is there who streams
        await receiver.receive(
            spec_of({**where, "url": "http://127.0.0.1:9"}, manifest_of(some_weights(3)), 9, seconds=1.0)
        )
    carrier.abandon()
    after = await send(carrier, receiver, (1, 3), some_weights(3), 2)
    assert not places(after) & places(again)
    await carrier.close()


async def test_a_method_that_an_engine_does_not_know_is_an_error_that_says_so() -> None:
    with pytest.raises(ChannelError, match="by 'pigeon', which this engine does not know"):
        await WeightReceiver().receive(spec_of({"method": "pigeon"}, []))
    with pytest.raises(ChannelError, match="by 'pigeon'"):
        WeightReceiver().receive_blocking(spec_of({"method": "pigeon"}, []))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_ends_the_trainer_at_once(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="this process has no GPU or a torch without NCCL"):
        open_channel(config(tmp_path, sync_method="collective", backend="nccl"))


def test_names_of_the_reference_are_taken_and_contradictions_refused() -> None:
    sync = SyncConfig.model_validate({"sync_method": "nccl"})
    assert (sync.sync_method, sync.backend, SyncConfig().pull_method) == ("collective", "nccl", "memory")
    assert SyncConfig(sync_method="checkpoint").pull_method == "checkpoint"
    with pytest.raises(ValueError, match="sync_method is 'nccl', but backend is 'gloo'"):
        SyncConfig.model_validate({"sync_method": "nccl", "backend": "gloo"})
    with pytest.raises(ValueError, match="pull is 'memory', but weights travel by checkpoint"):
        SyncConfig(sync_method="checkpoint", pull="memory")


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
    """A policy whose weights change with each version, and a carrier."""

    def __init__(self, folder: Path) -> None:
        settings = engine_config(folder)
        self.policy = Policy(settings.model, ensure_model_folder(settings.model, folder / "model", 0), 0)

    def step(self) -> None:
        with torch.no_grad():
            for _, tensor in self.policy.model.named_parameters():
                tensor.add_(torch.randn_like(tensor) * 0.02)

    async def sync(self, carrier: Channel, host: EngineHost, version: Version) -> dict[str, Any]:
        tensors, manifest = self.policy.weights(), self.policy.manifest()
        where = await carrier.offer(version, tensors, manifest)
        await host.pause()
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(host.receive(self.spec(where, version, version[1])))
            group.create_task(carrier.broadcast(tensors, manifest, version[1], version[1], 2))
        await host.commit(version, version[1])
        await carrier.committed(version, tensors, manifest)
        return receiving.result()

    def spec(self, where: dict[str, Any], version: Version, attempt: int = 1) -> dict[str, Any]:
        canary = {"tokens": CANARY}
        return spec_of(where, self.policy.manifest(), attempt, version=list(version), canary=canary)

    async def agrees(self, host: EngineHost, canary: dict[str, Any]) -> None:
        assert canary["logprobs"] == pytest.approx(self.policy.sequence_logprobs(CANARY), abs=1e-5)
        assert torch.equal(load(await host.weight(NAME))[NAME], dict(self.policy.weights())[NAME])


async def test_every_channel_and_every_pull(host: EngineHost, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step, method in enumerate(WAYS.values(), 1):
        carrier = open_channel(engine_config(tmp_path, **method))
        trainer.step()
        await trainer.agrees(host, await trainer.sync(carrier, host, (1, step)))
        # as an engine that came late does, at any time after
        found = await carrier.catch_up_source()
        assert found is not None
        version, where, _ = found
        await host.pause()
        canary = await host.receive(trainer.spec(where, version))
        await host.commit(version, step)
        await trainer.agrees(host, canary)
        assert host.snapshot.version == (1, step)
        await carrier.close()


async def test_damaged_weights_leave_the_old_ones_serving(host: EngineHost, tmp_path: Path) -> None:
    trainer, carrier = Trainer(tmp_path), MemoryChannel("127.0.0.1", 65536, 20.0)
    old = await trainer.sync(carrier, host, (1, 1))
    trainer.step()
    copy = await carrier.stage((1, 2), trainer.policy.weights(), trainer.policy.manifest(), digests=True)
    where = await carrier.offer((1, 2), trainer.policy.weights(), trainer.policy.manifest())
    copy.flats[-1][0] += 1
    await host.pause()
    with pytest.raises(ReceiveFailed, match="checksum") as failed:
        await host.receive(trainer.spec(where, (1, 2)))
    assert not failed.value.touched
    await host.resume()
    found = await carrier.catch_up_source()
    assert found is not None
    version, where, _ = found
    assert version == (1, 1)
    await host.pause()
    again = await host.receive(trainer.spec(where, version))
    assert again["logprobs"] == old["logprobs"]
    await host.commit(version, 1)
    await carrier.close()
