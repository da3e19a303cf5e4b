"""A checkpoint from somebody else runs nothing, wherever it is read."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.checkpoints.old_checkpoint import OPTIMIZER_FILE, read_old_facts
from trinity_mq.training.checkpoints.state import StatePart, read_parts, read_policy, write_parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
Reader = Callable[[Path, dict[str, torch.Tensor]], Any]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._marker),))


def tensors() -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.ones(3, number + 1).to(dtype) for number, dtype in enumerate(DTYPES)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    write_parts(tmp_path / "made", {"policy": StatePart(tensors()), "other": StatePart({"scalar": torch.tensor(3.5)})})
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


def test_a_checkpoint_of_ones_own_is_read_whatever_its_types(checkpoint: Path) -> None:
    state = {name: torch.zeros_like(one) for name, one in tensors().items()}
    parts = read_parts(checkpoint, {"policy": state})
    assert all(torch.equal(state[name], one) for name, one in tensors().items())
    assert parts["other"].tensors["scalar"].item() == 3.5


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
        read(checkpoint, tensors())
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
        read(checkpoint, tensors())
    assert not (tmp_path / "ran").exists()


def test_files_elsewhere_are_not_read(checkpoint: Path, read: Reader) -> None:
    def edit(content: Metadata) -> None:
        for info in content.storage_data.values():
            info.relative_path = f"../../{info.relative_path}"

    change(checkpoint, edit)
    with pytest.raises(DamagedCheckpointError, match="which is not a file of the checkpoint"):
        read(checkpoint, tensors())


@pytest.mark.parametrize("body", [b"", b"\x80\x04.", b"\x80\x04K\x05.", b"garbage", pickle.dumps({"a": 1})])
def test_what_is_no_index_is_a_damaged_checkpoint(checkpoint: Path, read: Reader, body: bytes) -> None:
    index_of(checkpoint).write_bytes(body)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged or missing"):
        read(checkpoint, tensors())


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
