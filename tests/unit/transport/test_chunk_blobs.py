"""Chunks in the blob store go when no kept checkpoint leads back to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.transport.batch_blobs import ChunkBlobs
from trinity_mq.transport.blobs import BlobStore


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    made = BlobStore(f"file://{tmp_path}/blobs", "r", 1 << 20)
    for ticket in "abcdef":
        made.put(f"ready/{ticket}/o-0.tmqx", b"x")
    return made


def left(store: BlobStore) -> str:
    return "".join(store.folders("ready"))


def saved(blobs: ChunkBlobs, consumed: Iterable[str], *, last: bool = False) -> None:
    run_virtually(blobs.saved(consumed, last=last))


def test_what_the_oldest_kept_checkpoint_has_behind_it_goes(store: BlobStore) -> None:
    blobs = ChunkBlobs(store, keep=3)
    seen = []
    for consumed in ("a", "ab", "abc", "abcd", "abcde"):
        saved(blobs, consumed)
        seen.append(left(store))
    assert seen == ["abcdef", "abcdef", "bcdef", "cdef", "def"]
    saved(blobs, "abcde", last=True)
    assert left(store) == "f"


def test_a_set_that_comes_after_its_batch_was_consumed_goes_with_the_next_save(store: BlobStore) -> None:
    blobs = ChunkBlobs(store, keep=1)
    saved(blobs, "a")
    store.put("ready/a/thawed-0.tmqx", b"x")
    saved(blobs, "a")
    assert left(store) == "bcdef"


def test_a_store_that_is_away_costs_no_more_than_some_seconds(store: BlobStore, tmp_path: Path) -> None:
    blobs = ChunkBlobs(store, keep=1)
    (tmp_path / "blobs").rename(tmp_path / "aside")
    (tmp_path / "blobs").write_bytes(b"")
    with capture_logs() as lines:
        saved(blobs, "a")
    assert lines[-1]["event"] == "blobs_not_deleted"
    (tmp_path / "blobs").unlink()
    (tmp_path / "aside").rename(tmp_path / "blobs")
    saved(blobs, "ab")
    assert left(store) == "cdef"
