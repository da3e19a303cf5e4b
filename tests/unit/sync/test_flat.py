"""Buckets: what is packed, in which order, and how far ahead of who takes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import dtype_of, fill, packed, plan, prefetch, raw, split

TENSORS = [
    ("a", torch.arange(100.0)),
    ("b", torch.full((3, 400), 0.5, dtype=torch.bfloat16)),
    ("c", torch.tensor(7.0)),
    ("none", torch.empty(0, 4)),
    ("flags", torch.tensor([True, False])),
    ("across", torch.arange(12.0).view(3, 4).T),
]
MANIFEST = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in TENSORS]


@pytest.mark.parametrize("size", [16, 1000, 10**9])
def test_buckets_keep_order_names_dtypes_and_values(size: int) -> None:
    buckets = plan(MANIFEST, size)
    found = {}
    for bucket, flat in zip(buckets, packed(buckets, TENSORS), strict=True):
        assert len(bucket.entries) == 1 or bucket.num_bytes <= size
        assert torch.equal(flat, fill(bucket, dict(TENSORS)))
        assert len(raw(flat)) == bucket.num_bytes
        found.update(split(bucket, flat))
    assert list(found) == [name for name, _ in TENSORS]
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS)


def test_tensors_are_taken_when_their_bucket_is_due() -> None:
    taken: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS:
            taken.append(name)
            yield name, tensor

    flats = packed(plan(MANIFEST, 16), source())
    next(flats)
    assert taken == ["a"]
    next(flats)
    assert taken == ["a", "b"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("b", torch.ones(4))], "the order of their manifest: got 'b', wanted 'a'"),
        ([], "got 'nothing', wanted 'a'"),
        ([("a", torch.ones(2, 2))], r"'a' has shape \[2, 2\], its manifest says \[4\]"),
    ],
)
def test_other_tensors_than_the_manifests_are_an_error(tensors: list[tuple[str, torch.Tensor]], said: str) -> None:
    with pytest.raises(ChannelError, match=said):
        list(packed(plan([("a", "float32", [4])], 1024), tensors))


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
