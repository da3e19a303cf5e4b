"""Weights over HTTP: who may read them, what damage and broken connections cost, and what memory is given back. And
weights as files: whole or not there, verified by whoever reads, old ones removed and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import digest, raw
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.checkpoint.files import MANIFEST as MANIFEST_FILE
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.testing.tcp_proxy import FaultProxy

from .weights import BUCKET, manifest_of, same, send, some_weights, spec_of

TENSORS = some_weights(1)
MANIFEST = manifest_of(TENSORS)


@pytest.fixture
async def channel() -> AsyncIterator[MemoryChannel]:
    opened = MemoryChannel("127.0.0.1", BUCKET, 20.0)
    yield opened
    await opened.close()


async def receive(where: dict[str, Any], **more: Any) -> Any:
    return await WeightReceiver().receive(spec_of(where, MANIFEST, **more))


async def test_without_the_token_nobody_reads(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    with pytest.raises(ChannelError, match="401"):
        await receive({**where, "token": "guessed"})
    async with aiohttp.ClientSession() as session, session.get(f"{where['url']}/0") as answer:
        assert answer.status == 401


async def test_odd_requests_are_answered_and_harm_nobody(channel: MemoryChannel) -> None:
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    headers = {"Authorization": f"Bearer {where['token']}"}
    async with aiohttp.ClientSession() as session:
        for path in ("999999999", "9" * 5000, "-1", "0/../../secret", "%00", ""):
            async with session.get(f"{where['url']}/{path}", headers=headers) as answer:
                assert answer.status in {404, 400}, path
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
