"""A checkpoint is whole or not there, wherever the trainer dies."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import pickle
import shutil
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from structlog.testing import capture_logs
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.runtime.process import disk_full_message
from trinity_mq.runtime.state_formats import NewerStateError
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.training.checkpoints.benchmarked import FIRST_MODEL, checksums, select_checkpoints
from trinity_mq.training.checkpoints.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    StepAttempts,
    TrainerProgress,
    find_by_name,
    publish_final,
    verify,
)
from trinity_mq.training.checkpoints.old_checkpoint import OPTIMIZER_FILE, read_old_facts
from trinity_mq.training.checkpoints.state import (
    Rows,
    StatePart,
    read_parts,
    read_policy,
    stored_policy,
    write_index,
    write_parts,
    write_shard,
)


def state(progress: int, generation: int = 1, step: int | None = None) -> TrainerProgress:
    return TrainerProgress(
        generation=generation,
        step=progress if step is None else step,
        progress=progress,
        source={"offset": 17, "decided": ["a"]},
    )


def writer(text: str = "weights") -> Callable[[Path], Awaitable[None]]:
    async def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_text(text)
        (folder / "optimizer.pt").write_text("moments")

    return write


def text_of(store: CheckpointStore) -> str:
    latest = store.latest()
    assert latest is not None
    return (latest.path / "model" / "model.safetensors").read_text()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


Hooks = Callable[[Callable[[Path, Path], object]], None]


@pytest.fixture
def before_rename(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """Return a function that has a hook called with source and target before each rename."""
    rename = Path.rename

    def install(hook: Callable[[Path, Path], object]) -> None:
        def hooked(self: Path, target: Path) -> Path:
            hook(self, target)
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", hooked)

    return install


async def test_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    async def write(folder: Path) -> str:
        await writer()(folder)
        return "checksum of the weights"

    store = CheckpointStore(tmp_path / "new" / "checkpoints", 2)
    assert store.latest() is None
    saved = await store.save(write, state(50))
    assert (saved.path.name, saved.weights, saved.state) == ("progress-000050", "checksum of the weights", state(50))
    again = CheckpointStore(tmp_path / "new" / "checkpoints", 2)
    assert again.latest() == saved
    assert text_of(again) == "weights"


async def test_everything_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, on_sync: Callable[[Callable[[int], object]], None], before_rename: Hooks
) -> None:
    done: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    on_sync(lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2]))
    before_rename(lambda source, target: done.append(f"rename {target.name}"))
    await store.save(writer(), state(1))
    moved = done.index("rename progress-000001")
    assert {"model", "model.safetensors", "optimizer.pt", "trainer.json"} <= set(done[:moved])
    assert done[moved + 1 :] == ["checkpoints"]


@pytest.mark.parametrize(
    ("error", "disk_is_full", "message"),
    [
        pytest.param(
            OSError(28, "No space left on device"),
            False,
            r"progress-000002.*No space left.*MiB are free.*untouched",
            id="no room",
        ),
        pytest.param(RuntimeError("unexpected pos 704 vs 598"), True, "No space left", id="no room, which it hides"),
        pytest.param(RuntimeError("unexpected pos 704 vs 598"), False, "unexpected pos", id="something else"),
        pytest.param(asyncio.CancelledError(), False, None, id="cancelled"),
    ],
)
async def test_a_writer_that_fails_leaves_what_was_there(
    tmp_path: Path,
    on_sync: Callable[[Callable[[int], object]], None],
    error: BaseException,
    disk_is_full: bool,
    message: str | None,
) -> None:
    async def fails(folder: Path) -> None:
        await writer("new")(folder)
        raise error

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, 2)
    await store.save(writer("old"), state(1))
    if disk_is_full:
        on_sync(full)
    with pytest.raises(CheckpointError if message else asyncio.CancelledError, match=message) as caught:
        await store.save(fails, state(2))
    assert (disk_full_message(caught.value) is not None) == (message is not None and "No space left" in message)
    assert visible(tmp_path) == ["progress-000001"]
    assert text_of(store) == "old"


@pytest.mark.parametrize("progress", [1, 2])
@pytest.mark.parametrize(
    ("error", "message"), [(KeyboardInterrupt, None), (PermissionError(13, "Permission denied"), "Permission denied")]
)
async def test_a_save_that_ends_before_its_rename_leaves_what_was_there(
    tmp_path: Path, before_rename: Hooks, progress: int, error: Any, message: str | None
) -> None:
    """Progress 1 replaces the checkpoint that is there, 2 comes after it."""
    store = CheckpointStore(tmp_path, 2)
    await store.save(writer("old"), state(1))

    def fails(source: Path, target: Path) -> None:
        if source.name.startswith(".partial-"):
            shutil.copytree(source, tmp_path / ".partial-copy")  # as a killed process leaves it behind
            raise error

    before_rename(fails)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError, match=message):
        await store.save(writer("new"), state(progress))
    if message:
        assert text_of(store) == "old", "also before a restart cleans up"
    assert text_of(CheckpointStore(tmp_path, 2)) == "old"
    assert visible(tmp_path) == ["progress-000001"]


async def test_the_newest_stay_and_of_every_so_many_batches_one_for_good(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, 100)
    for progress in (50, 100, 150, 240, 260, 300, 301, 302):
        await store.save(writer(), state(progress))
    assert visible(tmp_path) == [f"progress-{one:06d}" for one in (100, 240, 300, 301, 302)]
    again = CheckpointStore(tmp_path, 1, None)
    await again.save(writer(), state(1_000_000))
    assert visible(tmp_path) == ["progress-1000000"]


async def test_a_changed_byte_shows_before_anything_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    saved = await store.save(writer(), state(1))
    assert store.latest() == saved
    verify(saved)
    path = saved.path / "model" / "model.safetensors"
    path.write_text("weighty")
    found = store.latest()
    assert found is not None
    with pytest.raises(DamagedCheckpointError, match=r"model/model\.safetensors has the checksum .* has changed"):
        verify(found)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"model/model\.safetensors cannot be read"):
        verify(found)


async def test_a_checkpoint_of_release_0_1_0_says_no_format_and_no_checksums_and_is_gone_on_from(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, 2)
    saved = await store.save(writer(), state(1))
    with_fields(saved.path / "trainer.json", format=None, release=None, checksums=None, weights=None)
    latest = store.latest()
    assert latest is not None
    verify(latest)
    assert (latest.state, latest.weights) == (saved.state, None)
    assert store.next_generation() == 2


def with_fields(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in {**content, **fields}.items() if value is not None}))


async def test_a_checkpoint_of_a_newer_release_is_refused_and_nothing_older_is_taken_in_its_place(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, 3)
    await store.save(writer(), state(1))
    newer = await store.save(writer(), state(2))
    with_fields(newer.path / "trainer.json", format=2, release="0.9.0", state={"of": "another form"})
    for use in (store.latest, store.next_generation, lambda: find_by_name(tmp_path, "progress-1")):
        with pytest.raises(NewerStateError) as refused:
            use()
        said = str(refused.value)
        assert "progress-000002/trainer.json has format 2, written by release 0.9.0" in said
        assert "reads formats 1 to 1. Upgrade trinity-mq here, or restore" in said
    assert not (tmp_path / "generation").exists()
    assert visible(tmp_path) == ["progress-000001", "progress-000002"]


# -- one that is chosen


async def test_checkpoints_have_names_by_batches_and_by_train_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    for progress, step in ((50, 45), (100, 90), (101, 90), (150, 140)):
        await store.save(writer(), state(progress, step=step))
    for name, progress in {"progress-50": 50, "progress-000100": 100, "step-90": 101, "step-140": 150}.items():
        assert find_by_name(tmp_path, name).state.progress == progress
    with pytest.raises(
        CheckpointError, match=r"no checkpoint step-50 in .*progress-000050 \(step-45\), progress-000100"
    ):
        find_by_name(tmp_path, "step-50")
    with pytest.raises(CheckpointError, match=r"'newest' is not the name of a checkpoint, such as step-120"):
        find_by_name(tmp_path, "newest")
    (tmp_path / "progress-000150" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"progress-000150 is damaged: .*optimizer\.pt"):
        find_by_name(tmp_path, "progress-150")
    with pytest.raises(CheckpointError, match="available: none"):
        find_by_name(tmp_path / "nowhere", "step-1")


# -- the final model


async def test_the_final_model_is_put_in_place_whole(
    tmp_path: Path, on_sync: Callable[[Callable[[int], object]], None]
) -> None:
    async def write(text: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_text(text)

    async def fails(folder: Path) -> None:
        await write("half", folder)
        raise OSError(28, "No space left on device")

    async def hides(error: Exception, folder: Path) -> None:
        await write("half", folder)
        raise error

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    final = tmp_path / "final"
    await publish_final(lambda folder: write("old", folder), final)
    await publish_final(lambda folder: write("new", folder), final)
    assert (final / "model").read_text() == "new"
    with pytest.raises(CheckpointError, match=r"cannot write the final model to .*final: .*No space left"):
        await publish_final(fails, final)
    with pytest.raises(KeyError):
        await publish_final(lambda folder: hides(KeyError("absent"), folder), final)
    on_sync(full)
    with pytest.raises(CheckpointError, match=r"cannot write the final model to .*final: .*No space left"):
        await publish_final(lambda folder: hides(SafetensorError("I/O error"), folder), final)
    assert (final / "model").read_text() == "new"
    assert list(tmp_path.iterdir()) == [final]


async def test_the_final_model_replaces_a_link_and_not_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    async def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_text("new")

    final, other = tmp_path / "final", tmp_path / "other"
    await publish_final(write, other)
    (other / "model").write_text("old")
    final.symlink_to(other)
    await publish_final(write, final)
    assert not final.is_symlink()
    assert [(folder / "model").read_text() for folder in (final, other)] == ["new", "old"]


@pytest.mark.parametrize(
    "damage",
    [
        ("optimizer.pt", "mo"),
        ("model/model.safetensors", None),
        ("trainer.json", None),
        ("trainer.json", '{"state": {"generation": 1}'),
        ("trainer.json", '{"format": "new"}'),
    ],
)
async def test_a_damaged_one_is_skipped_with_a_warning_and_does_not_push_out_a_whole_one(
    tmp_path: Path, damage: tuple[str, str | None]
) -> None:
    store = CheckpointStore(tmp_path, 2)
    for progress in (1, 3):
        await store.save(writer(), state(progress))
    folder = tmp_path / "progress-000003"
    name, content = damage
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with capture_logs() as logs:
        latest = store.latest()
    assert latest is not None
    assert latest.state.progress == 1
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("damaged_checkpoint_skipped", "warning")]
    await store.save(writer(), state(2))
    assert visible(tmp_path) == ["progress-000001", "progress-000002", "progress-000003"]
    await store.save(writer("new"), state(3))
    assert visible(tmp_path) == ["progress-000002", "progress-000003"]
    assert text_of(store) == "new"


async def test_the_newest_checkpoint_is_the_newest_generations(tmp_path: Path) -> None:
    """A late save of a trainer that was cut off has more progress than those of the one that went on."""
    store = CheckpointStore(tmp_path, 2)
    for generation, progress in ((1, 20), (1, 45), (2, 25), (2, 30)):
        await store.save(writer(f"{generation}/{progress}"), state(progress, generation))
    assert text_of(store) == "2/30"
    assert visible(tmp_path) == ["progress-000025", "progress-000030"], "the line that goes on is what is kept"


@pytest.mark.parametrize("progress", [2, 3])
async def test_a_trainer_that_was_cut_off_saves_nothing(tmp_path: Path, progress: int) -> None:
    """Progress 2 would replace a checkpoint of the trainer that went on."""
    cut_off, other = CheckpointStore(tmp_path, 2), CheckpointStore(tmp_path, 2)
    assert cut_off.next_generation() == 1
    await cut_off.save(writer("old"), state(1, 1))

    async def slow(folder: Path) -> None:
        await writer("late")(folder)
        assert other.next_generation() == 2
        await other.save(writer("new"), state(2, 2))

    for write in (slow, writer("later")):
        with pytest.raises(RestartRequested, match="another trainer has resumed this run as generation 2"):
            await cut_off.save(write, state(progress, 1))
        assert visible(tmp_path) == ["generation", "progress-000001", "progress-000002"]
        assert text_of(other) == "new"


async def test_a_commit_that_stood_still_gives_the_newer_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_rename: Hooks
) -> None:
    cut_off, other = CheckpointStore(tmp_path, 2), CheckpointStore(tmp_path, 2)
    assert cut_off.next_generation() == 1

    def save_the_other(source: Path, target: Path) -> None:
        if target.name.startswith(".retired-"):
            monkeypatch.undo()
            assert other.next_generation() == 2
            asyncio.run(other.save(writer("new"), state(1, 2)))

    await cut_off.save(writer("old"), state(1, 1))
    before_rename(save_the_other)
    with pytest.raises(RestartRequested, match="generation 2"):
        await cut_off.save(writer("late"), state(1, 1))
    assert visible(tmp_path) == ["generation", "progress-000001"]
    assert text_of(other) == "new"


async def test_generations_rise_with_every_start_and_above_every_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, 2).next_generation() == 1
    store = CheckpointStore(tmp_path, 2)
    assert store.next_generation() == 2
    await store.save(writer(), state(1, generation=7))
    assert store.next_generation() == 8
    (tmp_path / "generation").unlink()
    assert store.next_generation() == 8
    assert store.next_generation(after=11) == 12


def test_a_start_that_is_called_off_takes_back_itself_only(tmp_path: Path) -> None:
    StepAttempts(tmp_path).begin(["a"])  # killed here
    attempts = StepAttempts(tmp_path)

    def called_off() -> None:
        with attempts.noted(["a", "b"]):
            assert (StepAttempts(tmp_path).starts("a"), StepAttempts(tmp_path).starts("b")) == (2, 1)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        called_off()
    assert (StepAttempts(tmp_path).starts("a"), StepAttempts(tmp_path).starts("b")) == (1, 0)


def test_a_start_that_fails_counts_also_when_the_process_ends_because_of_it(tmp_path: Path) -> None:
    attempts = StepAttempts(tmp_path)
    with pytest.raises(MemoryError), attempts.noted(["a"]):
        raise MemoryError
    attempts.withdraw()
    assert StepAttempts(tmp_path).starts("a") == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": null}'])
def test_unreadable_attempts_count_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "attempts.json").write_text(content)
    with capture_logs() as logs:
        attempts = StepAttempts(tmp_path)
    assert logs[0]["event"] == "step_attempts_unreadable"
    attempts.begin(["a"])
    assert StepAttempts(tmp_path).starts("a") == 1


async def save(folder: Path) -> None:
    await CheckpointStore(folder, 2).save(writer(), state(1))


async def count_the_start(folder: Path) -> None:
    CheckpointStore(folder, 2).next_generation()


async def begin_a_step(folder: Path) -> None:
    StepAttempts(folder).begin(["a"])


async def look_for_what_is_usable(folder: Path) -> None:
    CheckpointStore(folder, 2).usable()


@pytest.mark.parametrize(
    ("in_the_way", "use", "message"),
    [
        ("generation", count_the_start, r"count the start.*many"),
        ("generation", save, r"cannot save progress-000001.*many"),
        ("chosen.json", look_for_what_is_usable, r"chosen\.json is damaged .*; remove it to resume from the newest"),
        ("", save, r"cannot prepare the folder.*checkpoints"),
        ("", begin_a_step, r"cannot write.*attempts\.json"),
    ],
    ids=["a counter", "a counter when saving", "a choice", "a folder", "attempts"],
)
async def test_a_file_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, in_the_way: str, use: Callable[[Path], Awaitable[None]], message: str
) -> None:
    folder = tmp_path / "checkpoints"
    if in_the_way:
        folder.mkdir()
    (folder / in_the_way).write_text("many")
    with pytest.raises(CheckpointError, match=message):
        await use(folder)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
Reader = Callable[[Path, dict[str, torch.Tensor]], Any]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._marker),))


def some_tensors() -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.ones(3, number + 1).to(dtype) for number, dtype in enumerate(DTYPES)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    write_parts(
        tmp_path / "made", {"policy": StatePart(some_tensors()), "other": StatePart({"scalar": torch.tensor(3.5)})}
    )
    return tmp_path / "made"


@pytest.fixture(params=["all parts", "beyond what is held", "the policy"])
def read(request: pytest.FixtureRequest) -> Reader:
    readers: dict[str, Reader] = {
        "all parts": lambda folder, state: read_parts(folder, {"policy": state}),
        "beyond what is held": lambda folder, state: read_parts(folder, {}),
        "the policy": read_policy,
    }
    return readers[request.param]


def index_of(checkpoint: Path) -> Path:
    return checkpoint / "state" / ".metadata"


def change(checkpoint: Path, edit: Callable[[Metadata], None]) -> None:
    path = index_of(checkpoint)
    content = pickle.loads(path.read_bytes())
    edit(content)
    path.write_bytes(pickle.dumps(content))


def test_rows_that_several_ranks_wrote_are_read_as_a_whole(tmp_path: Path) -> None:
    whole = {"matrix": torch.randn(7, 3), "vector": torch.randn(2), "number": torch.tensor(3.5)}
    chunks = []
    for rank in reversed(range(4)):
        part = StatePart({"number": whole["number"]})
        for name, rows in (("matrix", 2), ("vector", 1)):
            part.tensors[name] = whole[name][rank * rows : (rank + 1) * rows].clone()
            part.rows[name] = Rows(min(rank * rows, len(whole[name])), tuple(whole[name].shape))
        chunks += write_shard(tmp_path, {"policy": part}, rank)
    write_index(tmp_path, {"policy": part}, chunks)
    found = read_parts(tmp_path, {})["policy"].tensors
    late = stored_policy(tmp_path)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(late[name], tensor)
        assert torch.equal(late.placeholders()[name].contiguous(), tensor)


def test_a_checkpoint_of_ones_own_is_read_whatever_its_types(checkpoint: Path) -> None:
    state = {name: torch.zeros_like(one) for name, one in some_tensors().items()}
    parts = read_parts(checkpoint, {"policy": state})
    assert all(torch.equal(state[name], one) for name, one in some_tensors().items())
    assert parts["other"].tensors["scalar"].item() == 3.5


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_of_debians_python_is_read_and_its_getattr_reaches_nothing_else(
    checkpoint: Path, read: Reader
) -> None:
    content = pickle.loads(index_of(checkpoint).read_bytes())
    with index_of(checkpoint).open("wb") as file:
        OlderPickler(file).dump(content)
    assert b"getattr" in index_of(checkpoint).read_bytes()
    read(checkpoint, some_tensors())
    index_of(checkpoint).write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x08\x00\x00\x00__base__tR.")
    with pytest.raises(DamagedCheckpointError, match="wanted a memory format"):
        read(checkpoint, some_tensors())


@pytest.mark.parametrize("changed", ["torch.distributed.checkpoint.metadata\nStorageMeta", "builtins\ngetattr"])
def test_an_index_changes_no_class_and_no_function_of_this_process(
    checkpoint: Path, read: Reader, changed: str
) -> None:
    attribute = b"X\x07\x00\x00\x00load_idX\x07\x00\x00\x00changed"
    index_of(checkpoint).write_bytes(b"\x80\x02c" + changed.encode() + b"\nN}" + attribute + b"s\x86b.")
    with pytest.raises(DamagedCheckpointError, match=r"sets the state of a (type|function)"):
        read(checkpoint, some_tensors())
    assert StorageMeta.load_id is None


@pytest.mark.parametrize("where", ["index", "planner data", "a value", "a name"])
def test_an_index_with_a_program_runs_nothing_and_is_named(
    checkpoint: Path, tmp_path: Path, read: Reader, where: str
) -> None:
    payload: Any = Payload(tmp_path / "ran")

    def edit(content: Metadata) -> None:
        if where == "planner data":
            content.planner_data = payload
        elif where == "a value":
            content.state_dict_metadata["policy.w0"] = payload
        else:
            content.storage_meta = payload

    if where == "index":
        index_of(checkpoint).write_bytes(pickle.dumps(payload))
    elif where == "a name":  # by what is admitted: a dotted name reaches into modules
        index_of(checkpoint).write_bytes(b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.")
    else:
        change(checkpoint, edit)
    with pytest.raises(DamagedCheckpointError) as caught:
        read(checkpoint, some_tensors())
    assert str(index_of(checkpoint)) in str(caught.value)
    assert "no code was executed" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_an_entry_that_is_no_tensor_is_not_loaded(checkpoint: Path, tmp_path: Path, read: Reader) -> None:
    """Torch would load it with an unpickler that calls anything."""
    torch.save(Payload(tmp_path / "ran"), tmp_path / "payload")

    def edit(content: Metadata) -> None:
        content.state_dict_metadata["policy.w0"] = BytesStorageMetadata()
        for key, info in content.storage_data.items():
            if key.fqn == "policy.w0":
                info.relative_path, info.offset, info.length = "payload", 0, (tmp_path / "payload").stat().st_size

    change(checkpoint, edit)
    shutil.copy(tmp_path / "payload", checkpoint / "state" / "payload")
    with pytest.raises(DamagedCheckpointError, match=r"'policy\.w0' is not a tensor"):
        read(checkpoint, some_tensors())
    assert not (tmp_path / "ran").exists()


def test_files_elsewhere_are_not_read(checkpoint: Path, read: Reader) -> None:
    def edit(content: Metadata) -> None:
        for info in content.storage_data.values():
            info.relative_path = f"../../{info.relative_path}"

    change(checkpoint, edit)
    with pytest.raises(DamagedCheckpointError, match="which is not a file of the checkpoint"):
        read(checkpoint, some_tensors())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        *[(body, "it is not a pickle, or has been cut off") for body in (b"", b"J\x01", b"\x80\x04.", b"no pickle")],
        *[(pickle.dumps(value), "wanted an index") for value in (5, {"a": 1})],
    ],
)
def test_what_is_no_index_is_a_damaged_checkpoint(checkpoint: Path, read: Reader, body: bytes, reason: str) -> None:
    index_of(checkpoint).write_bytes(body)
    with pytest.raises(DamagedCheckpointError, match=rf"\.metadata is damaged or missing: .*{reason}"):
        read(checkpoint, some_tensors())


def test_a_name_other_than_a_text_is_a_damaged_checkpoint(checkpoint: Path, read: Reader) -> None:
    def edit(content: Metadata) -> None:
        content.state_dict_metadata[5] = content.state_dict_metadata["policy.w0"]  # type: ignore[index]

    change(checkpoint, edit)
    with pytest.raises(DamagedCheckpointError, match="5 is the name of a tensor, wanted a text"):
        read(checkpoint, some_tensors())


def test_tensors_beyond_all_memory_are_a_damaged_checkpoint(checkpoint: Path) -> None:
    def edit(content: Metadata) -> None:
        content.state_dict_metadata["other.scalar"].size = torch.Size([1 << 60])  # type: ignore[union-attr]

    change(checkpoint, edit)
    with pytest.raises(DamagedCheckpointError, match="does not load"):
        read_parts(checkpoint, {})


def test_a_checkpoint_of_an_earlier_release_runs_nothing(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "ran"), tmp_path / OPTIMIZER_FILE)
    with pytest.raises(DamagedCheckpointError, match="is damaged or missing"):
        read_old_facts(tmp_path)
    assert not (tmp_path / "ran").exists()


SETS = [{"name": "held-out", "storage_type": "synthetic", "path": "max3"}]


def bench_config(folder: Path, bench: dict[str, Any] | None = None, **settings: Any) -> Config:
    return load_config(
        {
            "name": "x",
            "mode": "bench",
            "run_dir": str(folder / "run"),
            "model": {"tiny": {}},
            "buffer": {"eval_tasksets": SETS},
            "bench": bench or {},
            **settings,
        }
    )


def save_some(folder: Path, *progress: int) -> None:
    """Save checkpoints as a trainer does."""
    store = CheckpointStore(folder / "run" / "checkpoints", 9)
    generation = store.next_generation()

    async def write(into: Path) -> str:
        (into / "weights").write_text("w")
        return f"sum of {into.name}"

    for one in progress:
        state = TrainerProgress(generation=generation, step=one, progress=one, source={})
        asyncio.run(store.save(write, state))


def test_all_of_them_in_order_after_the_first_model(tmp_path: Path) -> None:
    save_some(tmp_path, 5, 20, 100)
    found = select_checkpoints(bench_config(tmp_path))
    assert list(found) == [0, 5, 20, 100]
    assert found[0] is None
    assert found[20] is not None
    assert found[20].path.name == "progress-000020"
    assert list(select_checkpoints(bench_config(tmp_path, explorer={"eval_on_startup": False}))) == [5, 20, 100]
    assert checksums(bench_config(tmp_path))[0] == FIRST_MODEL
    assert len(set(checksums(bench_config(tmp_path)).values())) == 4


@pytest.mark.parametrize(
    ("wanted", "labels"), [("latest", [100]), ([100, 5], [5, 100]), ([0], [0]), ([0, 20], [0, 20])]
)
def test_some_of_them(tmp_path: Path, wanted: Any, labels: list[int]) -> None:
    save_some(tmp_path, 5, 20, 100)
    assert list(select_checkpoints(bench_config(tmp_path, {"checkpoints": wanted}))) == labels


def test_what_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint to evaluate in .*run/checkpoints: give the folder"):
        select_checkpoints(bench_config(tmp_path))
    first = bench_config(tmp_path, {"checkpoints": [0]})
    assert select_checkpoints(first) == {0: None}, "the first model is in no checkpoint"
    save_some(tmp_path, 5, 20)
    missing = r"bench\.checkpoints: 7 not among the checkpoints in .*, which are 5, 20"
    with pytest.raises(CheckpointError, match=missing):
        select_checkpoints(bench_config(tmp_path, {"checkpoints": [5, 7]}))
    (tmp_path / "run" / "checkpoints" / "progress-000005" / "weights").unlink()
    assert list(select_checkpoints(bench_config(tmp_path))) == [0, 20]
    with pytest.raises(CheckpointError, match="progress-000005 is damaged"):
        select_checkpoints(bench_config(tmp_path, {"checkpoints": [5]}))


def test_an_evaluation_is_a_run_of_its_own_beside_the_one_it_evaluates(tmp_path: Path) -> None:
    found = bench_config(tmp_path)
    assert (found.name, found.path, found.bench.run) == ("x-bench", tmp_path / "run-bench", str(tmp_path / "run"))
    again = load_config(found.model_dump())
    assert (again.name, again.path, again.bench.run) == (found.name, found.path, found.bench.run)
    given = bench_config(tmp_path, {"run": "elsewhere"})
    assert (given.name, given.path, given.bench.run) == ("x", tmp_path / "run", "elsewhere")
    assert len(bench_config(tmp_path, name="n" * 40).name) == 40


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffer": {}}, "mode is bench and buffer.eval_tasksets is empty"),
        ({"trainer": {"nproc": 2}}, "trainer.nproc is 2 in mode bench"),
        ({"bench": {"checkpoints": [-1]}}, "bench.checkpoints"),
        ({"bench": {"checkpoints": "newest"}}, "bench.checkpoints"),
        ({"bench": 5}, "bench"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench_config(tmp_path, **settings) if "bench" not in settings else load_config(
            {"mode": "bench", "model": {"tiny": {}}, "buffer": {"eval_tasksets": SETS}, **settings}
        )


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_it_waits_for_the_end(pool: ThreadPoolExecutor, fails: bool) -> None:
    begun, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        ended.set()
        if fails:
            raise OSError("after the cancellation")

    running = asyncio.ensure_future(run_to_end(pool, work))
    await begun.wait()
    for _ in range(2):
        running.cancel()
        await asyncio.wait({running}, timeout=0.02)
        assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await running
    assert ended.is_set()
    assert isinstance(caught.value.__cause__, OSError) == fails


async def test_cancelled_before_it_began_it_never_runs(pool: ThreadPoolExecutor) -> None:
    go_on, ran = threading.Event(), threading.Event()
    first = asyncio.ensure_future(run_to_end(pool, go_on.wait))
    second = asyncio.ensure_future(run_to_end(pool, ran.set))
    await asyncio.wait({second}, timeout=0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    go_on.set()
    assert await first
    assert not ran.is_set()
