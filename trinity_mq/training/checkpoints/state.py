"""The learner's state in a checkpoint, in named parts: tensors by ``torch.distributed.checkpoint``, the rest as JSON.

A part has a name such as ``policy`` or ``optimizer``. Every component of the learner that carries state across steps
has its own part, and needs no format of its own.

A checkpoint may come from an untrusted source. torch loads the index of its tensors, a pickle, with an unpickler that
can call anything, and loads non-tensor entries with another unpickler. :class:`TensorReader` admits only the names that
an index needs, sets the state only of the index's own objects, and reads only tensors.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.serialization import _get_layout

from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.parallel.sharding import own_rows

STATE_FOLDER = "state"
"""Folder in a checkpoint: tensors of all parts."""
FACTS_FILE = "learner.json"
"""File in a checkpoint: all other values, by part."""
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError, CheckpointException),
    *(AssertionError, AttributeError, IndexError, TypeError),  # raised by hostile bytes
)

_POLICY = "policy."
INDEX_FILE = ".metadata"
"""Name of the index in the folder of the tensors."""
_RECORDS = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    _StorageInfo,
)
"""Classes of the objects whose state an index may set."""


def _memory_format(enumeration: object, name: object) -> _MEM_FORMAT_ENCODING:
    """Return a member of the enumeration of memory formats. Python 3.11.0 to 3.11.3 write members as attributes."""
    if enumeration is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise UnpicklingError(
            f"the index refers to attribute {name!r:.80} of {enumeration!r:.80}, wanted a memory format"
        )
    return _MEM_FORMAT_ENCODING[str(name)]


_ADMITTED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _memory_format,
    **{(cls.__module__, cls.__qualname__): cls for cls in (*_RECORDS, _MEM_FORMAT_ENCODING)},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # the folder that the index was written to: pure paths, because the writer's operating system may differ
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", PosixPath.__name__): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
"""Admitted objects by module and name, as they appear in a pickle."""


@dataclass(frozen=True)
class Rows:
    """Place of a rank's rows in a tensor."""

    first: int
    size: tuple[int, ...]
    """Shape of the whole tensor."""


@dataclass
class StatePart:
    """State of one component of the learner."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by name. Of a tensor that is sharded over ranks, each rank writes and reads its own shard."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values other than tensors, stored as JSON. Floats are restored bit by bit."""
    rows: dict[str, Rows] = field(default_factory=dict)
    """Places of the tensors that are only this rank's rows of a tensor, by name."""


Parts = dict[str, StatePart]


def flat(parts: Mapping[str, StatePart]) -> dict[str, Tensor]:
    """Return all tensors by ``<part>.<name>``, the name that torch gives them in a checkpoint."""
    return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.tensors.items()}


def flat_rows(parts: Mapping[str, StatePart]) -> dict[str, Rows]:
    """Return the places of all tensors that hold only a rank's rows, by ``<part>.<name>`` as in :func:`flat`."""
    return {f"{part}.{name}": rows for part, state in parts.items() for name, rows in state.rows.items()}


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters and persistent buffers of a module by name, tied parameters once."""
    once = {name for name, _ in module.named_parameters()}
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def optimizer_part(optimizer: torch.optim.Optimizer, module: nn.Module) -> StatePart:
    """Return the state of a module's optimizer, by parameter name."""
    names = _names_in_order(optimizer, module)
    saved = optimizer.state_dict()
    groups = [{key: _plain(value) for key, value in group.items()} for group in saved["param_groups"]]
    part = StatePart(facts={"names": names, "param_groups": groups, "numbers": {}})
    for number, values in saved["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                part.tensors[f"{names[number]}/{key}"] = value
            else:
                part.facts["numbers"].setdefault(names[number], {})[key] = value
    return part


def optimizer_state(part: StatePart) -> dict[str, Any]:
    """Return the argument of ``Optimizer.load_state_dict`` for the result of :func:`optimizer_part`.

    Raises:
        KeyError: The part is not an optimizer part.
    """
    number_of = {name: number for number, name in enumerate(part.facts["names"])}
    state: dict[int, dict[str, Any]] = {
        number_of[name]: dict(numbers) for name, numbers in part.facts["numbers"].items()
    }
    for name, tensor in part.tensors.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(number_of[parameter], {})[key] = tensor
    return {"state": state, "param_groups": part.facts["param_groups"]}


def _names_in_order(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


class HostCopies:
    """Copies of parts in host memory. The buffers are reused for the next copy, because allocating memory takes many
    times as long as copying into it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, parts: Mapping[str, StatePart]) -> Parts:
        """Return a copy of ``parts``, valid until the next call. The copy of a sharded tensor has only this rank's
        rows.
        """
        before, self._buffers = self._buffers, {}
        is_on_device = False
        copies: Parts = {}
        for part, state in parts.items():
            copies[part] = StatePart(facts=state.facts)
            for name, value in state.tensors.items():
                tensor, rows = own_rows(value)
                key = f"{part}.{name}"
                buffer = before.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._buffers[key] = copies[part].tensors[name] = buffer.copy_(tensor, non_blocking=True)
                if rows is not None:
                    copies[part].rows[name] = Rows(rows.start, tuple(value.shape))
                is_on_device |= tensor.is_cuda
        if is_on_device:
            torch.cuda.synchronize()
        return copies


@dataclass(frozen=True)
class StoredRows:
    """A tensor, or rows of a tensor, in a file of a checkpoint. All fields can be sent in a message."""

    name: str
    """Name of the tensor, see :func:`flat`."""
    first: int
    """Index of the first of these rows in the tensor."""
    sizes: tuple[int, ...]
    """Shape of these rows."""
    file: str
    offset: int
    """Position in the file in bytes."""
    length: int
    """Length in bytes."""

    @property
    def offsets(self) -> torch.Size:
        """Position of these rows in the tensor, by dimension."""
        return torch.Size([self.first, *[0] * (len(self.sizes) - 1)] if self.sizes else [])


class _Planner(DefaultSavePlanner):
    """Finds the tensors to write by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: dcp.MetadataIndex) -> Any:
        """Return the tensor to write."""
        return self._tensors[index.fqn]


def write_shard(folder: Path, parts: Mapping[str, StatePart], rank: int) -> list[StoredRows]:
    """Write a rank's rows of the tensors into a checkpoint, and return their places. Tensors that are not sharded, and
    all other values, are written by rank 0 only.

    Raises:
        OSError: The files cannot be written.
    """
    if not rank:
        facts = {name: part.facts for name, part in parts.items()}
        (folder / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    tensors, rows = flat(parts), flat_rows(parts)
    items = []
    for name, tensor in tensors.items():
        place = rows.get(name, Rows(0, tuple(tensor.shape)))
        if not tensor.numel() if name in rows else rank:
            continue
        offsets = torch.Size([place.first, *[0] * (tensor.ndim - 1)] if tensor.ndim else [])
        chunk = dcp.ChunkStorageMetadata(offsets, tensor.size())
        data = TensorWriteData(chunk, dcp.TensorProperties.create_from_tensor(tensor), torch.Size(place.size))
        items.append(WriteItem(dcp.MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    # rank 0 syncs its files to disk when it commits the checkpoint; other ranks may be on other machines
    writer = FileSystemWriter(folder / STATE_FOLDER, sync_files=bool(rank))
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    results = writer.write_data(SavePlan(items, _StoragePrefix(f"__{rank}_")), _Planner(tensors)).value()
    return [
        StoredRows(
            *(result.index.fqn, (result.index.offset or [0])[0], tuple(tensors[result.index.fqn].shape)),
            *(result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length),
        )
        for result in results
    ]


def write_index(folder: Path, parts: Mapping[str, StatePart], chunks: Iterable[StoredRows]) -> None:
    """Write the index of a checkpoint, after all ranks have written their tensors.

    Args:
        folder: The checkpoint.
        parts: The parts that rank 0 has written.
        chunks: Places of the tensors of all ranks.

    Raises:
        OSError: The file cannot be written.
    """
    rows = flat_rows(parts)
    entries = {
        name: TensorStorageMetadata(
            dcp.TensorProperties.create_from_tensor(tensor),
            torch.Size(rows[name].size if name in rows else tensor.shape),
            [],
        )
        for name, tensor in flat(parts).items()
    }
    results = []
    for chunk in chunks:
        entries[chunk.name].chunks.append(dcp.ChunkStorageMetadata(chunk.offsets, torch.Size(chunk.sizes)))
        storage = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        results.append(WriteResult(dcp.MetadataIndex(chunk.name, chunk.offsets), chunk.length, storage))
    paths = {f"{part}.{name}": (part, name) for part, state in parts.items() for name in state.tensors}
    writer = FileSystemWriter(folder / STATE_FOLDER, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(dcp.Metadata(dict(entries), planner_data=paths), [results])


def write_parts(folder: Path, parts: Mapping[str, StatePart]) -> None:
    """Write ``parts``, whose tensors are whole, into a checkpoint that has no parts yet.

    Raises:
        OSError: The files cannot be written.
    """
    write_index(folder, parts, write_shard(folder, parts, 0))


def read_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the values other than tensors in a checkpoint, by part.

    Raises:
        DamagedCheckpointError: The file cannot be read.
    """
    path = folder / FACTS_FILE
    try:
        facts: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(values, dict) for values in facts.values()):
            raise ValueError("a part is not a JSON object")
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or missing: {error}") from error
    return facts


def read_parts(
    folder: Path, states: Mapping[str, dict[str, Tensor]], weights: Mapping[str, Mapping[str, Tensor]] | None = None
) -> Parts:
    """Return the parts of a checkpoint. Parts in ``states`` are read into the given tensors. All other parts are read
    into new tensors: sharded like the weight that they belong to, or in host memory.

    Args:
        folder: The checkpoint.
        states: Live tensors by part. The checkpoint must contain them.
        weights: Weights by parameter name, for each part that holds the state of their optimizer.

    Raises:
        DamagedCheckpointError: The checkpoint does not load, or has different tensors; the live tensors may have
            changed by then.
    """
    facts, reader = read_facts(folder), TensorReader(folder / STATE_FOLDER)
    live = {name: StatePart(tensors, facts.get(name, {})) for name, tensors in states.items()}
    index = reader.entries()
    parts = {name: StatePart(facts=values) for name, values in facts.items()} | live
    with reader.loading():
        for name in _names_outside(live, index, reader.folder):
            part, _, rest = name.partition(".")
            weight = (weights or {}).get(part, {}).get(rest.rpartition("/")[0])
            new = _empty(index[name], weight)
            parts.setdefault(part, StatePart()).tensors[rest] = new
        nested = {name: part.tensors for name, part in parts.items() if part.tensors}
        load(nested, storage_reader=reader, no_dist=True)
    return parts


def _empty(entry: TensorStorageMetadata, weight: Tensor | None) -> Tensor:
    """Return a tensor to read ``entry`` into, sharded like ``weight`` if ``weight`` is sharded and has its shape."""
    dtype = entry.properties.dtype
    if isinstance(weight, DTensor) and weight.shape == entry.size:
        return torch.empty_like(weight.detach(), dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


class LateTensors(Mapping[str, Tensor]):
    """Whole tensors by name, each read when it is asked for, so that a reader needs memory for few of them.

    Args:
        shapes: Tensors on the meta device with the shapes and data types, by name.
        read: Returns the tensor of a name, in host memory.
    """

    def __init__(self, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self.shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def placeholders(self) -> dict[str, Tensor]:
        """Return a tensor without memory for each name. Its method ``contiguous`` reads the values and returns them."""
        return {name: _Placeholder(shape, partial(self._read, name)) for name, shape in self.shapes.items()}


class _Placeholder(Tensor):
    """Tensor on the meta device. Its method ``contiguous`` returns a tensor with the values."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001  # as torch.nn.Parameter
    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Tensor, read: Callable[[], Tensor]) -> _Placeholder:
        placeholder: _Placeholder = Tensor._make_subclass(cls, shape)  # noqa: SLF001
        placeholder._read = read
        return placeholder

    def __init__(self, shape: Tensor, read: Callable[[], Tensor]) -> None:
        super().__init__()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return the tensor with its values."""
        return self._read().contiguous()


def stored_policy(folder: Path) -> LateTensors:
    """Return the policy's tensors of a checkpoint that this process has written.

    Raises:
        DamagedCheckpointError: The index cannot be read. Reading a tensor may raise it too.
    """
    reader = TensorReader(folder / STATE_FOLDER)
    entries = {
        name.removeprefix(_POLICY): entry for name, entry in reader.entries().items() if name.startswith(_POLICY)
    }

    def read(name: str) -> Tensor:
        tensor = _empty(entries[name], None)
        with reader.loading():
            load({"policy": {name: tensor}}, storage_reader=reader, no_dist=True)
        return tensor

    shapes = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta") for name, entry in entries.items()
    }
    return LateTensors(shapes, read)


def read_policy(folder: Path, state: dict[str, Tensor]) -> None:
    """Read only the policy's weights of a checkpoint, into the live tensors ``state``.

    Raises:
        DamagedCheckpointError: The weights do not load, or belong to another model; the live tensors may have changed
            by then.
    """
    reader = TensorReader(folder / STATE_FOLDER)
    names = [name for name in reader.entries() if name.startswith(_POLICY)]
    _names_outside({"policy": StatePart(state)}, names, reader.folder)
    with reader.loading():
        load({"policy": state}, storage_reader=reader, no_dist=True)


def _names_outside(live: Mapping[str, StatePart], names: Iterable[str], path: Path) -> list[str]:
    """Return the elements of ``names`` that belong to none of the parts in ``live``.

    Raises:
        DamagedCheckpointError: A part in ``live`` has different names in the checkpoint.
    """
    rest = set(names)
    for part, state in live.items():
        expected = {f"{part}.{name}" for name in state.tensors}
        actual = {name for name in rest if name.startswith(f"{part}.")}
        if actual != expected:
            name = min(actual ^ expected)
            fault = "has no" if name in expected else "has a"
            raise DamagedCheckpointError(f"{path} does not fit the model: it {fault} tensor {name!r}")
        rest -= actual
    return sorted(rest)


def _cause(error: BaseException) -> Exception:
    """Return ``error``, or the first rank's error inside it: torch wraps errors of ranks, even of a single process."""
    if isinstance(error, CheckpointException):
        inner = next((failure[0] for failure in error.failures.values()), None)
        return inner if isinstance(inner, Exception) else RuntimeError(str(error))
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _hostile(action: str) -> UnpicklingError:
    return UnpicklingError(
        f"the index {action}, which the index of a checkpoint does not need; no code was executed. Do not use this "
        "checkpoint: somebody has put a program into it"
    )


_set_state: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]  # noqa: SLF001


class _Unpickler(pickle._Unpickler):  # noqa: SLF001  # in Python, because the unpickler in C has no hook for the state
    stack: list[Any]

    def load(self) -> Any:
        """Return the object in the pickle.

        Raises:
            UnpicklingError: The pickle is malformed, or asks for something that an index does not need. Hostile bytes
                may raise other errors too.
        """
        try:
            return super().load()
        except (EOFError, LookupError, struct.error) as error:
            raise UnpicklingError(f"it is not a pickle, or has been cut off: {error!r}") from error

    def find_class(self, module: str, name: str) -> Any:
        """Return the object with an admitted name; reject all other names."""
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _hostile(f"refers to {module:.80}.{name:.80}") from None

    def _load_build(self) -> None:
        """Set the state of an object of the index. The state of a class or a function would change this process."""
        if type(self.stack[-2]) not in _RECORDS:
            raise _hostile(f"sets the state of a {type(self.stack[-2]).__name__}")
        _set_state(self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,  # noqa: SLF001
        pickle.BUILD[0]: _load_build,
    }


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint.

    Args:
        path: Folder of the tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # saving and loading in a single process is intended here
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        self.folder, self._index = path, path / INDEX_FILE
        self._content: dcp.Metadata | None = None

    def entries(self) -> dict[str, TensorStorageMetadata]:
        """Return the tensors of the checkpoint by name.

        Raises:
            DamagedCheckpointError: The index of the checkpoint cannot be read, or asks for a name that is not admitted.
        """
        with self._errors(f"{self._index} is damaged or missing"):
            return self.read_metadata().state_dict_metadata  # type: ignore[return-value]

    def loading(self) -> AbstractContextManager[None]:
        """Turn errors of torch in the ``with`` block into a :class:`DamagedCheckpointError`."""
        return self._errors(f"{self.folder} does not load")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise DamagedCheckpointError(f"{what}: {_cause(error)}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index, which is read once.

        Raises:
            OSError: The index cannot be read.
            UnpicklingError: The index asks for a name that is not admitted.
            ValueError: The file is not an index, has entries other than tensors, or names files outside the folder.
        """
        if self._content is not None:
            return self._content
        index = _Unpickler(io.BytesIO(self._index.read_bytes())).load()
        if not isinstance(index, dcp.Metadata) or not isinstance(index.state_dict_metadata, dict):
            raise ValueError(f"{self._index} holds a {type(index).__name__}, wanted an index")
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.80} is the name of a tensor, wanted a text")
            if not isinstance(entry, dcp.TensorStorageMetadata):  # torch would load it with its own unpickler
                raise ValueError(f"{name!r:.80} is not a tensor, and only tensors are read")
        files = {entry.relative_path for entry in (index.storage_data or {}).values()}
        if elsewhere := sorted(name for name in files if PurePath(name).name != name):
            raise ValueError(
                f"{self._index} names the file {elsewhere[0]!r:.80}, which is not a file of the checkpoint"
            )
        index.storage_meta = index.storage_meta or dcp.StorageMeta()
        index.storage_meta.load_id = self.load_id
        self._content = index
        return index
