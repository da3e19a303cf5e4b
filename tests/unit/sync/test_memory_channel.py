"""Weights over HTTP: who may read them, what damage and broken connections cost, and what memory is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import torch
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import raw
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


async def test_damaged_weights_are_never_taken_in(channel: MemoryChannel) -> None:
    copy = await channel.stage((1, 1), TENSORS, MANIFEST, digests=True)
    where = await channel.offer((1, 1), TENSORS, MANIFEST)
    copy.flats[2][5] += 1
    with pytest.raises(ChannelError, match=r"bucket 2 of .* did not arrive in 3 tries: .*the checksum is"):
        await receive(where)
    channel.abandon()  # and the next try has another copy
    assert same(await receive(await channel.offer((1, 1), TENSORS, MANIFEST)), TENSORS)


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
