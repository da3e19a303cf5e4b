"""The blob store: what is written is whole, what is read is ours, and a store that is away has lost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from structlog.testing import capture_logs

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import DecodeError, ExperienceReference, encode
from trinity_mq.runtime.deliveries import REFERENCE
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.transport.batch_blobs import GRACE, SWEEP_INTERVAL, BlobSweep, ChunkBlobs, delete_blobs, part_name
from trinity_mq.transport.blobs import (
    MARK,
    BlobDamaged,
    BlobMissing,
    BlobRefused,
    BlobStore,
    StoreUnavailable,
    open_store,
    resolved_size,
    run_with_store_retries,
)

NAME = "batch/t1/a-0.tmqx"
BODY = bytes(range(256)) * 300
LIMIT = 1 << 20


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    root = f"file://{tmp_path}/blobs" if request.param == "file" else f"memory://{tmp_path.name}/blobs"
    return BlobStore(root, "run-1", LIMIT)


@pytest.fixture
def local(tmp_path: Path) -> BlobStore:
    return BlobStore(f"file://{tmp_path}/blobs", "run-1", LIMIT)


def changed(reference: ExperienceReference, **fields: Any) -> ExperienceReference:
    return reference.model_copy(update=fields)


# -- what is written is read


def test_what_is_put_is_got(store: BlobStore) -> None:
    with capture_logs() as lines:
        reference = store.put(NAME, BODY)
    assert reference.url == f"{store.url}/{NAME}"
    assert (reference.bytes, reference.sha256) == (len(BODY), hashlib.sha256(BODY).hexdigest())
    assert reference.experiences == 1
    assert [(line["event"], line["blob"], line["bytes"]) for line in lines] == [("blob_written", NAME, len(BODY))]
    assert store.get(reference) == BODY
    assert BlobStore(store.url.removesuffix("/run-1"), "run-1", LIMIT).get(reference) == BODY


def test_folders_and_their_removal(store: BlobStore) -> None:
    assert store.folders("batch") == []
    for ticket in ("t1", "t2", "t3"):
        store.put(f"batch/{ticket}/a-0.tmqx", BODY)
        store.put(f"batch/{ticket}/a-1.tmqx", BODY)
    kept = store.put("ready/t1/o-0.tmqx", BODY)
    assert store.folders("batch") == ["t1", "t2", "t3"]
    store.delete("batch/t1", "batch/none", "batch/t2/a-0.tmqx")
    assert store.folders("batch") == ["t2", "t3"]
    store.delete("batch/t3")
    assert store.folders("batch") == ["t2"]
    assert store.get(kept) == BODY
    store.delete_run()
    assert store.folders("ready") == []
    store.delete_run()  # nothing is there: fine
    assert store.get(store.put(NAME, BODY)) == BODY  # and it is a store again


@contextlib.contextmanager
def on_file_system(store: BlobStore, **methods: Callable[..., Any]) -> Iterator[BlobStore]:
    """The same store, on a file system that has these methods in place of its own."""
    scheme = store.url.partition(":")[0]
    plain = fsspec.get_filesystem_class(scheme)
    fsspec.register_implementation(scheme, type(plain.__name__, (plain,), methods), clobber=True)
    try:
        yield BlobStore(store.url.removesuffix("/run-1"), "run-1", LIMIT)
    finally:
        fsspec.register_implementation(scheme, plain, clobber=True)


def fails_test(*_: object, **__: object) -> None:
    pytest.fail("read")


def test_runs_do_not_see_each_other(store: BlobStore) -> None:
    other = BlobStore(store.url.removesuffix("/run-1"), "run-12", LIMIT)
    reference = store.put(NAME, BODY)
    with pytest.raises(BlobRefused, match="wanted a blob under"):
        other.get(reference)
    other.delete_run()
    assert store.get(reference) == BODY


def test_a_blob_appears_at_once_and_whole(
    local: BlobStore, tmp_path: Path, on_sync: Callable[[Callable[[int], object]], None]
) -> None:
    local.put("batch/t1/first.tmqx", BODY)
    folder = tmp_path / "blobs/run-1/batch/t1"
    seen: list[list[str]] = []

    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(".second.tmqx"):
            raise OSError(28, "No space left on device")
        if path.is_file():
            seen.append(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
            assert path.read_bytes() == BODY

    on_sync(watched)
    local.put(NAME, BODY)
    assert seen == [["first.tmqx"]]
    with pytest.raises(StoreUnavailable, match="No space left"):
        local.put("batch/t1/second.tmqx", BODY)
    assert sorted(path.name for path in folder.iterdir()) == ["a-0.tmqx", "first.tmqx"]


# -- what is read is ours


@pytest.mark.parametrize(
    "url",
    [
        "{store}/../../../../etc/passwd",
        "{store}/batch/../../other/x",
        "{store}/batch/t1/..%2f..%2fx",
        "{store}//etc/passwd",
        "{store}/",
        "{store}",
        "{store}-2/batch/t1/a-0.tmqx",
        "{store}/batch/t1/.hidden",
        "{store}/batch/t1/a\n-0.tmqx",
        "{store}/batch/t1/a-0.tmqx\n",
        "{store}/batch\\t1",
        "{store}/batch/t1/a-0.tmqx?versionId=1",
        "{store}/batch/*",
        "http://127.0.0.1:9/run-1/batch/t1/a-0.tmqx",
        "file:///etc/passwd",
        "/etc/passwd",
        "simplecache::file:///etc/passwd",
        "",
        "x" * 100_000,
    ],
)
def test_a_reference_that_leads_elsewhere_is_refused_unopened(store: BlobStore, url: str) -> None:
    reference = store.put(NAME, BODY)
    with (
        on_file_system(store, info=fails_test) as unread,
        pytest.raises(DecodeError, match=r"broker\.blob_store") as caught,
    ):
        unread.get(changed(reference, url=url.replace("{store}", store.url)))
    assert len(str(caught.value)) < 1000


def test_links_are_not_followed(local: BlobStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (tmp_path / "outside").mkdir()
    for path in (secret, tmp_path / "outside" / "a-0.tmqx"):
        path.write_bytes(BODY)
    reference = local.put("batch/t0/a-0.tmqx", BODY)
    root = tmp_path / "blobs/run-1/batch"
    (root / "t0" / "link.tmqx").symlink_to(secret)
    (root / "t1").symlink_to(tmp_path / "outside")
    for name in ("batch/t0/link.tmqx", NAME):
        with pytest.raises(BlobRefused, match="is a symbolic link"):
            local.get(changed(reference, url=f"{local.url}/{name}"))
    with pytest.raises(BlobRefused, match="is a symbolic link"):
        local.put("batch/t1/b-0.tmqx", BODY)
    with pytest.raises(BlobRefused, match="is a symbolic link"):
        local.delete("batch/t1")
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["a-0.tmqx"]


def test_the_store_itself_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "blobs").symlink_to(tmp_path / "disk")
    store = BlobStore(f"file://{tmp_path}/blobs", "run-1", LIMIT)
    assert store.get(store.put(NAME, BODY)) == BODY


@pytest.mark.parametrize("name", ["../x", "/x", "", "batch//x", "batch/.x", "batch/t 1", "batch/t1/", "a" + "\0"])
def test_names_that_are_none_of_a_blob(store: BlobStore, name: str) -> None:
    with pytest.raises(BlobRefused, match="not a valid blob name"):
        store.put(name, BODY)
    with pytest.raises(BlobRefused, match="not a valid blob name"):
        store.delete(name)


# -- what is read is whole


def overwrite(store: BlobStore, body: bytes) -> None:
    filesystem, path = fsspec.core.url_to_fs(f"{store.url}/{NAME}")
    filesystem.pipe_file(path, body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (BODY[:-1], f"has {len(BODY) - 1} bytes, its reference says {len(BODY)}"),
        (BODY + b"x", f"has {len(BODY) + 1} bytes, its reference says {len(BODY)}"),
        (b"", "has 0 bytes"),
        (BODY[:-1] + b"\0", "another SHA-256"),
    ],
)
def test_a_damaged_blob_is_told_by_size_and_checksum(store: BlobStore, body: bytes, words: str) -> None:
    reference = store.put(NAME, BODY)
    overwrite(store, body)
    with pytest.raises(BlobDamaged, match=words):
        store.get(reference)


def test_a_wrong_size_is_seen_before_it_is_read(store: BlobStore) -> None:
    reference = store.put(NAME, BODY)
    overwrite(store, BODY * 2)
    with on_file_system(store, cat_file=fails_test) as unread:
        with pytest.raises(BlobDamaged):
            unread.get(reference)
        with pytest.raises(BlobRefused, match=rf"over broker\.max_batch_bytes {LIMIT}"):
            unread.get(changed(reference, bytes=LIMIT + 1))


def test_a_folder_or_pipe_in_its_place_is_damage(local: BlobStore, tmp_path: Path) -> None:
    reference = local.put("batch/t1/x.tmqx", BODY)
    (tmp_path / "blobs/run-1" / NAME).mkdir()
    os.mkfifo(tmp_path / "blobs/run-1/batch/t1/pipe.tmqx")
    for name in (NAME, "batch/t1/pipe.tmqx"):
        with pytest.raises(BlobDamaged):
            local.get(changed(reference, url=f"{local.url}/{name}"))


# -- gone, or only not there now


def test_a_missing_blob_is_gone_only_where_the_store_is_there(store: BlobStore) -> None:
    reference = store.put(NAME, BODY)
    store.delete(NAME)
    with pytest.raises(BlobMissing, match="does not exist"):
        store.get(reference)
    store.delete(MARK)
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        store.get(reference)


def test_whatever_its_library_raises_is_one_error(store: BlobStore) -> None:
    reference = store.put(NAME, BODY)

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("expired token")

    names = ("info", "ls", "rm", "pipe_file", "invalidate_cache")
    with on_file_system(store, **dict.fromkeys(names, broken)) as away:
        for act in (lambda: away.get(reference), lambda: away.folders("batch"), lambda: away.delete(NAME)):
            with pytest.raises(StoreUnavailable, match="RuntimeError: expired token"):
                act()


# -- opening one


def test_a_store_that_no_library_opens_is_fatal_at_the_start() -> None:
    with pytest.raises(FatalError, match=r"broker\.blob_store: no library opens nosuch:// URLs here"):
        open_store(BrokerConfig(blob_store="nosuch://bucket/x"), "r")


# -- patience


def test_patience_tries_again_and_ends() -> None:
    calls: list[float] = []

    def fails_until(until: float) -> str:
        now = asyncio.get_running_loop().time()
        calls.append(now)
        if now < until:
            raise StoreUnavailable("down")
        return "up"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await run_with_store_retries(fails_until, 30.0) == "up"
        assert 30 <= loop.time() < 45
        assert 4 < len(calls) < 200
        started = loop.time()
        with pytest.raises(StoreUnavailable, match="not done within 20 s; down"):
            await run_with_store_retries(fails_until, 1e9, seconds=20.0)
        assert loop.time() - started == pytest.approx(20)

    with capture_logs() as lines:
        run_virtually(main())
    assert {line["event"] for line in lines} == {"blob_store_unavailable"}


async def test_a_store_that_hangs_is_given_up() -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hangs() -> None:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result()

    with pytest.raises(StoreUnavailable, match="does not answer"):
        await run_with_store_retries(hangs, seconds=0.1)
    released.set()


# -- bodies that stand for one


def test_how_much_a_body_will_take(store: BlobStore) -> None:
    reference = store.put(NAME, BODY)
    assert resolved_size(store, encode(reference), REFERENCE) == len(BODY)
    for body in (encode(changed(reference, bytes=LIMIT + 1)), b"junk"):
        assert resolved_size(store, body, REFERENCE) == len(body), "it will be refused"


Act = Callable[[MemoryBus, BlobStore], Coroutine[Any, Any, None]]
TOPOLOGY = Topology("r")


def play(folder: Path, act: Act) -> list[Any]:
    """Run ``act`` beside a sweep."""
    store = BlobStore(f"file://{folder}/blobs", "r", 1 << 20)

    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
        await bus.connect()
        sweep = asyncio.create_task(BlobSweep(bus, TOPOLOGY, store).run())
        await act(bus, store)
        assert not sweep.done()
        sweep.cancel()

    with capture_logs() as lines:
        run_virtually(main())
    return lines


def put(store: BlobStore, ticket: str) -> None:
    store.put(part_name(ticket, "a", 0), b"x")


def test_only_what_has_no_queue_is_removed_and_only_after_the_grace(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        await bus.declare(TOPOLOGY.batch_queue(1, "open"))
        for ticket in ("open", "left"):
            put(store, ticket)
        await asyncio.sleep(GRACE - 1)
        assert store.folders("batch") == ["left", "open"]
        await asyncio.sleep(2 * SWEEP_INTERVAL + 1)
        assert store.folders("batch") == ["open"]
        await bus.delete(TOPOLOGY.batch_queue(1, "open").name)
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        assert store.folders("batch") == ["open"]
        await asyncio.sleep(3 * SWEEP_INTERVAL)
        assert store.folders("batch") == []

    play(tmp_path, act)


def test_a_queue_that_is_there_again_starts_the_grace_anew(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        put(store, "t")
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        await bus.declare(TOPOLOGY.batch_queue(1, "t"))
        await asyncio.sleep(2 * SWEEP_INTERVAL)
        await bus.delete(TOPOLOGY.batch_queue(1, "t").name)
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        assert store.folders("batch") == ["t"]

    play(tmp_path, act)


def test_a_store_that_is_down_for_a_while_ends_no_sweep(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        put(store, "t")
        (tmp_path / "blobs").rename(tmp_path / "aside")
        (tmp_path / "blobs").write_bytes(b"")
        await asyncio.sleep(2 * SWEEP_INTERVAL)
        (tmp_path / "blobs").unlink()
        (tmp_path / "aside").rename(tmp_path / "blobs")
        assert store.folders("batch") == ["t"]
        await asyncio.sleep(GRACE + 3 * SWEEP_INTERVAL)
        assert store.folders("batch") == []

    assert "sweep_failed" in {line["event"] for line in play(tmp_path, act)}


def test_a_deletion_that_fails_is_left_to_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"")
    store = BlobStore(f"file://{tmp_path}/blobs", "r", 1 << 20)
    with capture_logs() as lines:
        run_virtually(delete_blobs(store, "batch/t"))
        run_virtually(delete_blobs(store, "batch/../t"))
        run_virtually(delete_blobs(None, "batch/t"))
    assert [line["names"] for line in lines if line["event"] == "blobs_not_deleted"] == [("batch/t",), ("batch/../t",)]


@pytest.fixture
def chunks(tmp_path: Path) -> BlobStore:
    made = BlobStore(f"file://{tmp_path}/blobs", "r", 1 << 20)
    for ticket in "abcdef":
        made.put(f"ready/{ticket}/o-0.tmqx", b"x")
    return made


def left(chunks: BlobStore) -> str:
    return "".join(chunks.folders("ready"))


def saved(blobs: ChunkBlobs, consumed: Iterable[str], *, last: bool = False) -> None:
    run_virtually(blobs.saved(consumed, last=last))


def test_a_store_that_is_away_costs_no_more_than_some_seconds(chunks: BlobStore, tmp_path: Path) -> None:
    blobs = ChunkBlobs(chunks, keep=1)
    (tmp_path / "blobs").rename(tmp_path / "aside")
    (tmp_path / "blobs").write_bytes(b"")
    with capture_logs() as lines:
        saved(blobs, "a")
    assert lines[-1]["event"] == "blobs_not_deleted"
    (tmp_path / "blobs").unlink()
    (tmp_path / "aside").rename(tmp_path / "blobs")
    saved(blobs, "ab")
    assert left(chunks) == "cdef"
