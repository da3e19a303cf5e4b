"""Reads the index of a checkpoint's tensors, which torch writes as a pickle, without running what may be in it.

A checkpoint may come from somebody else. Torch loads its index with an unpickler that calls anything, and entries that
are no tensors with another one; here only names that an index needs are admitted, and only tensors are read.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.serialization import _get_layout

INDEX_FILE = ".metadata"
"""In the folder of the tensors: the index."""
_CLASSES = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(one.__module__, one.__qualname__): one for one in _CLASSES},
    **{("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # the folder that it was written to; it is read as text, whatever the system of its writer
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", PosixPath.__name__): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
"""By module and name as a pickle has them."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the object of an admitted name."""
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module:.80}.{name:.80}, which the index of a checkpoint does not need; nothing was run. "
                "Do not use this checkpoint: somebody has put a program into it"
            ) from None


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint.

    Args:
        path: The folder of the tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = path / INDEX_FILE

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index.

        Raises:
            OSError: It cannot be read.
            UnpicklingError: It asks for what no index needs.
            ValueError: It is none, has other things than tensors, or names files elsewhere.
        """
        found = _Unpickler(io.BytesIO(self._index.read_bytes())).load()
        if not isinstance(found, dcp.Metadata) or not isinstance(found.state_dict_metadata, dict):
            raise ValueError(f"{self._index} holds no index, but {type(found).__name__}")
        for name, entry in found.state_dict_metadata.items():
            if not isinstance(entry, dcp.TensorStorageMetadata):  # torch would load it with its own unpickler
                raise ValueError(f"{name!r:.80} is no tensor, and nothing else is read")
        files = {one.relative_path for one in (found.storage_data or {}).values()}
        if elsewhere := sorted(name for name in files if PurePath(name).name != name):
            raise ValueError(f"{self._index} names the file {elsewhere[0]!r:.80}, which is not one of the checkpoint's")
        found.storage_meta = found.storage_meta or dcp.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
