"""The host copy that a broadcast reads while it is filled; buckets: what is packed, in which order, how far ahead."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.distributed import (
    HashStore,  # type: ignore[attr-defined]  # public, but not declared as exported
)

from trinity_mq.config import load_config
from trinity_mq.sync.channels import base
from trinity_mq.sync.channels.base import ChannelError, Tensors
from trinity_mq.sync.channels.buckets import SpareBuffers, dtype_of, packed, plan, prefetch
from trinity_mq.sync.channels.collective.broadcast import TRANSPORTS, Group, Receiver, Sender, Transport
from trinity_mq.sync.channels.collective.channel import CollectiveChannel
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.memory.host_copy import HostCopy
from trinity_mq.sync.channels.receiver import WeightReceiver

from .weights import BUCKET, manifest_of, pull, same, some_weights, spec_of

TENSORS = some_weights(1)
MANIFEST = manifest_of(TENSORS)


class Held(list[tuple[str, Tensor]]):
    """Weights of which the last is read only when that is allowed; the first look at them holds nothing up."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.allowed, self._looked_at = threading.Event(), False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        looked_at, self._looked_at = self._looked_at, True
        for number, one in enumerate(super().__iter__()):
            if looked_at and number == len(self) - 1:
                assert self.allowed.wait(20)
            yield one


def in_thread(work: threading.Thread) -> threading.Thread:
    work.start()
    return work


def test_buckets_are_read_while_others_are_filled() -> None:
    copy, allowed = HostCopy((1, 1), MANIFEST, BUCKET), threading.Event()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from TENSORS[:-1]
        assert allowed.wait(20)
        yield TENSORS[-1]

    filling = in_thread(threading.Thread(target=lambda: copy.take(tensors(), digests=False)))
    buckets = copy.stream()
    found = [next(buckets) for _ in range(len(copy.buckets) - 1)]
    assert not copy.is_whole
    allowed.set()
    found += buckets
    filling.join(20)
    assert copy.is_whole
    assert [flat.data_ptr() for flat in found] == [flat.data_ptr() for flat in copy.flats]


def test_who_reads_a_copy_that_is_abandoned_or_fails_ends_with_the_reason() -> None:
    for reason, end in (
        ("was abandoned", HostCopy.release),
        ("ValueError: no", lambda one: one.fail(ValueError("no"))),
    ):
        copy, errors = HostCopy((1, 1), MANIFEST, BUCKET), []

        def read(copy: HostCopy = copy, errors: list[str] = errors) -> None:
            try:
                list(copy.stream())
            except ChannelError as error:
                errors.append(str(error))

        reading = in_thread(threading.Thread(target=read))
        end(copy)
        reading.join(20)
        assert not reading.is_alive()
        assert reason in errors[0]
        with pytest.raises(ChannelError, match=reason):
            copy.take(TENSORS, digests=False)
        assert copy.flats == []
        assert not copy.is_whole


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[CollectiveChannel]:
    settings = {"bucket_bytes": BUCKET, "sync_timeout": 20.0}
    opened = open_channel(load_config({"model": {"tiny": {}}, "run_dir": str(tmp_path), "synchronizer": settings}))
    assert isinstance(opened, CollectiveChannel)
    yield opened
    await opened.close()


async def test_an_offer_does_not_wait_for_the_copy_and_a_commit_does(channel: CollectiveChannel) -> None:
    held = Held(TENSORS)
    async with asyncio.timeout(10):
        where = await channel.offer((1, 1), held, MANIFEST)
    receiving = asyncio.create_task(WeightReceiver().receive(spec_of(where, MANIFEST)))
    sending = asyncio.create_task(channel.broadcast(held, MANIFEST, 1, 1, 2))
    committing = asyncio.create_task(channel.committed((1, 1), held, MANIFEST))
    done, _ = await asyncio.wait({sending, committing, receiving}, timeout=0.3)
    assert not done
    held.allowed.set()
    await asyncio.gather(sending, committing)
    assert same(await receiving, TENSORS)
    assert same((await pull(channel, WeightReceiver()))[1], TENSORS)


async def test_a_copy_that_is_abandoned_while_it_is_filled_is_made_anew_in_other_memory() -> None:
    memory = MemoryChannel("127.0.0.1", BUCKET, 20.0)
    channel = CollectiveChannel("127.0.0.1", BUCKET, 20.0, "gloo", memory)
    held, other = Held(TENSORS), some_weights(2)
    await channel.offer((1, 1), held, MANIFEST)
    filled = next(memory.begin((1, 1), held, MANIFEST, digests=False).stream())
    channel.abandon()
    where = await channel.offer((1, 1), other, MANIFEST)
    arrived, _ = await asyncio.gather(
        WeightReceiver().receive(spec_of(where, MANIFEST)), channel.broadcast(other, MANIFEST, 1, 1, 2)
    )
    held.allowed.set()
    assert same(arrived, other)
    again = memory.begin((1, 1), other, MANIFEST, digests=False)
    assert filled.data_ptr() not in {flat.data_ptr() for flat in again.flats}
    await channel.close()


async def test_weights_that_are_not_the_manifests_end_the_broadcast_with_that_reason(
    channel: CollectiveChannel,
) -> None:
    wrong = [*TENSORS[:-1], ("last", torch.zeros(2))]
    where = await channel.offer((1, 1), wrong, MANIFEST)
    receiving = asyncio.create_task(WeightReceiver().receive(spec_of(where, MANIFEST, seconds=2.0)))
    with pytest.raises(ChannelError, match="'last' has shape"):
        await channel.broadcast(wrong, MANIFEST, 1, 1, 2)
    with pytest.raises(ChannelError):
        await receiving
    with pytest.raises(ChannelError, match="'last' has shape"):
        await channel.committed((1, 1), wrong, MANIFEST)


def test_tensors_are_taken_when_their_bucket_is_due() -> None:
    taken: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS:
            taken.append(name)
            yield name, tensor

    flats = packed(plan(MANIFEST, 16), source())
    next(flats)
    assert taken == ["embed"]
    next(flats)
    assert taken == ["embed", "norm"]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="'float99'"):
        dtype_of("float99")
    with pytest.raises(ValueError, match="'nn'"):
        dtype_of("nn")  # torch has something of that name, and it is no dtype


def test_the_next_item_is_made_while_one_is_used_and_no_more() -> None:
    made = threading.Semaphore(0)
    count = 0

    def items() -> Iterator[int]:
        nonlocal count
        for number in range(6):
            count = number + 1
            made.release()
            yield number

    found = []
    for item in prefetch(items()):
        found.append(item)
        if item == 0:
            assert made.acquire(timeout=10)
            assert made.acquire(timeout=10)  # the second is made although nobody has asked for it
            assert count <= 3
    assert found == list(range(6))


def test_an_error_while_making_reaches_whoever_takes() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ChannelError("no more")

    taking = prefetch(items())
    assert next(taking) == 1
    with pytest.raises(ChannelError, match="no more"):
        next(taking)


def test_whoever_leaves_early_leaves_no_thread_behind() -> None:
    taking = prefetch(iter(range(1000)))
    assert next(taking) == 0
    [thread] = [one for one in threading.enumerate() if one.name == "packing"]
    taking.close()  # type: ignore[attr-defined]
    thread.join(10)
    assert not thread.is_alive()


async def test_broadcast_keeps_its_group_and_a_dead_peer_costs_one_deadline() -> None:
    sender, receiver = Sender("127.0.0.1", 1024, 2.0), Receiver()
    for attempt in (1, 2):
        spec = {**await few_spec(sender), "attempt": attempt}
        arrived, _ = await asyncio.gather(
            asyncio.to_thread(receiver.receive_blocking, spec), sender.broadcast(PAIR, PAIRS_MANIFEST, 1, attempt, 2)
        )
        assert same(arrived, PAIR)
    started = time.monotonic()
    with pytest.raises(ChannelError):
        await sender.broadcast(PAIR, PAIRS_MANIFEST, 1, 3, 2)
    assert time.monotonic() - started < 4.0
    with pytest.raises(ChannelError, match="no rendezvous"):
        await sender.broadcast(PAIR, PAIRS_MANIFEST, 2, 4, 2)


async def test_a_broadcast_has_the_time_that_its_bytes_need_at_the_slowest_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "SLOWEST_RATE", sum(tensor.nbytes for _, tensor in PAIR) / 10)
    sender, receiver = Sender("127.0.0.1", 16, 0.5), Receiver()

    def slow() -> Iterator[tuple[str, Tensor]]:
        for entry in PAIR:
            time.sleep(0.9)  # both together take longer than the base limit of 0.5 s and its second of grace
            yield entry

    spec = {**await few_spec(sender), "seconds": 10.5}
    started = time.monotonic()
    (arrived, _), _ = await asyncio.gather(
        receiver.receive(spec, SpareBuffers()), sender.broadcast(cast("Tensors", slow()), PAIRS_MANIFEST, 1, 1, 2)
    )
    assert time.monotonic() - started > 1.5
    assert same(arrived, PAIR)


class Work:
    """A broadcast that ends as a test says."""

    def __init__(self, end: Callable[[timedelta], None]) -> None:
        self._end = end

    def wait(self, timeout: timedelta) -> None:
        self._end(timeout)


class Communicator:
    """A process group that moves nothing, in the place of NCCL's."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.epochs = 0
        self.end: Callable[[timedelta], None] = lambda timeout: None

    def connect(self, store: object, rank: int, world: int, timeout: timedelta, device: torch.device) -> Communicator:
        self.epochs += 1
        return self

    def broadcast(self, tensors: list[Tensor], options: object) -> Work:
        self.sent += [tensor.clone() for tensor in tensors]
        return Work(self.end)


class Sharded:
    """A weight that a collective of the trainer's ranks gathers."""

    def __init__(self, tensor: Tensor, read: list[str], name: str) -> None:
        self._tensor, self._read, self._name = tensor, read, name

    def full_tensor(self) -> Tensor:
        self._read.append(self._name)
        return self._tensor


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    made = Communicator()
    monkeypatch.setitem(TRANSPORTS, "nccl", Transport(lambda: torch.device("cpu"), made.connect))
    return made


def alone(*, seconds: float = 20.0) -> CollectiveChannel:
    """Return a channel over NCCL whose barrier needs nobody else."""
    return CollectiveChannel("127.0.0.1", BUCKET, seconds, "nccl", MemoryChannel("127.0.0.1", BUCKET, seconds))


async def test_sharded_weights_are_gathered_before_engines_pause_and_live_weights_are_read_at_the_broadcast(
    communicator: Communicator,
) -> None:
    channel, read = alone(), list[str]()
    sharded = cast("Tensors", [(name, Sharded(tensor, read, name)) for name, tensor in TENSORS])
    await channel.offer((1, 1), sharded, MANIFEST)
    assert read == [name for name, _ in TENSORS]
    await channel.broadcast(sharded, MANIFEST, 1, 1, 1)
    await channel.committed((1, 1), sharded, MANIFEST)
    assert read == [name for name, _ in TENSORS], "no second gathering, in the order of the ranks' other collectives"
    assert all(map(torch.equal, communicator.sent, packed(plan(MANIFEST, BUCKET), TENSORS)))
    assert same((await pull(channel, WeightReceiver()))[1], TENSORS)
    await channel.offer((1, 2), live := some_weights(2), MANIFEST)
    communicator.sent.clear()
    await channel.broadcast(live, MANIFEST, 1, 2, 1)
    assert all(map(torch.equal, communicator.sent, packed(plan(MANIFEST, BUCKET), live)))
    await channel.committed((1, 2), live, MANIFEST)
    assert communicator.epochs == 1
    await channel.close()


@pytest.mark.parametrize("fault", ["hangs", "raises"])
async def test_a_communicator_that_fails_costs_one_deadline_and_is_not_used_again(
    communicator: Communicator, fault: str
) -> None:
    channel, released = alone(seconds=0.5), threading.Event()

    def fail(timeout: timedelta) -> None:
        assert 0.5 <= timeout.total_seconds() < 1.0
        if fault == "raises":
            raise RuntimeError("NCCL watchdog: remote process exited")
        released.wait(30)

    communicator.end = fail
    await channel.offer((1, 1), TENSORS, MANIFEST)
    started = time.monotonic()
    with pytest.raises(ChannelError, match="remote process exited" if fault == "raises" else "did not end within"):
        await channel.broadcast(TENSORS, MANIFEST, 1, 1, 1)
    assert time.monotonic() - started < 5.0
    channel.abandon()
    released.set()
    communicator.end = lambda timeout: None
    communicator.sent.clear()
    await channel.offer((1, 1), TENSORS, MANIFEST)
    await channel.broadcast(TENSORS, MANIFEST, 2, 2, 1)
    assert communicator.epochs == 2
    assert len(communicator.sent) == len(plan(MANIFEST, BUCKET))
    await channel.close()


async def test_an_engine_whose_communicator_fails_has_received_nothing_and_can_receive_again(
    communicator: Communicator,
) -> None:
    sender, receiver = Sender("127.0.0.1", 16, 5.0, "nccl"), Receiver()

    def fail(timeout: timedelta) -> None:
        raise RuntimeError("connection closed by peer")

    communicator.end = fail
    spec = await few_spec(sender)
    ends = await asyncio.gather(
        receiver.receive(spec, SpareBuffers()),
        sender.broadcast(PAIR, PAIRS_MANIFEST, 1, 1, 2),
        return_exceptions=True,
    )
    assert all(isinstance(end, ChannelError) and "closed by peer" in str(end) for end in ends), ends
    communicator.end = lambda timeout: None
    spec = await few_spec(sender, epoch=2)
    (arrived, _), _ = await asyncio.gather(
        receiver.receive(spec, SpareBuffers()), sender.broadcast(PAIR, PAIRS_MANIFEST, 2, 1, 2)
    )
    assert arrived.keys() == dict(PAIR).keys()


def test_store_keeps_the_keys_of_one_barrier() -> None:
    store = HashStore()
    groups = [Group(store, 1, rank, 3, 20.0) for rank in range(3)]
    counts = []
    with ThreadPoolExecutor(3) as pool:
        for attempt in range(1, 6):
            list(pool.map(lambda group, number=attempt: group.barrier(number), groups))
            counts.append(store.num_keys())
    assert counts == [3] * 5


PAIR = [("a", torch.arange(3.0)), ("b", torch.full((2, 2), 0.5))]
PAIRS_MANIFEST = manifest_of(PAIR)


async def few_spec(sender: Sender, epoch: int = 1) -> dict[str, object]:
    common = {"epoch": epoch, "attempt": 1, "rank": 1, "world": 2, "seconds": 10.0, "manifest": PAIRS_MANIFEST}
    return {**await sender.rendezvous(), **common}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_buffers_that_are_reused_are_pinned_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    [bucket, *_] = plan(MANIFEST, BUCKET)
    for pinned, has_gpu in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda has_gpu=has_gpu: has_gpu)
        with capture_logs() as logged:
            flat = SpareBuffers(pinned=pinned).take(bucket)
        assert (flat.numel(), flat.device.type) == (bucket.num_elements, "cpu")
        assert [entry["event"] for entry in logged] == ["host_memory_not_pinned"] * (pinned and has_gpu)
