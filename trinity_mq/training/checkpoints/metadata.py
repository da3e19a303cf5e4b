"""Reads the index of a checkpoint's tensors, a pickle written by torch, without executing code in the pickle.

A checkpoint may come from an untrusted source. torch loads its index with an unpickler that can call anything, and
loads non-tensor entries with another unpickler. This module admits only the names that an index needs, and reads only
tensors.
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
"""Name of the index in the folder of the tensors."""
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
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # the folder it was written to: pure paths, because the writer's operating system may differ
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", PosixPath.__name__): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
"""Admitted objects by module and name, as they appear in a pickle."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the object with an admitted name; reject all other names."""
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"the index refers to {module:.80}.{name:.80}, which the index of a checkpoint does not need; no code "
                "was executed. Do not use this checkpoint: somebody has put a program into it"
            ) from None


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint.

    Args:
        path: Folder of the tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = path / INDEX_FILE

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index.

        Raises:
            OSError: The index cannot be read.
            UnpicklingError: The index asks for a name that is not admitted.
            ValueError: The file is not an index, has entries other than tensors, or names files outside the folder.
        """
        index = _Unpickler(io.BytesIO(self._index.read_bytes())).load()
        if not isinstance(index, dcp.Metadata) or not isinstance(index.state_dict_metadata, dict):
            raise ValueError(f"{self._index} holds a {type(index).__name__}, wanted an index")
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, dcp.TensorStorageMetadata):  # torch would load it with its own unpickler
                raise ValueError(f"{name!r:.80} is not a tensor, and only tensors are read")
        files = {entry.relative_path for entry in (index.storage_data or {}).values()}
        if elsewhere := sorted(name for name in files if PurePath(name).name != name):
            raise ValueError(
                f"{self._index} names the file {elsewhere[0]!r:.80}, which is not a file of the checkpoint"
            )
        index.storage_meta = index.storage_meta or dcp.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index
