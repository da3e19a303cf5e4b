"""Versions of weights as files: safetensors shards and a manifest, in a local folder or an fsspec URL. Blocks.

A version consists of ``<root>/<generation>.<step>-<random>/shard-00000.safetensors`` and so on. ``manifest.json`` is
written last and holds size and checksum of each shard: a folder without it is not a version. Local files appear by a
rename after they are synced to disk. Objects in a store appear when they are complete.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
import xxhash
from torch import Tensor

from trinity_mq.experience.codec.tail import DTYPES
from trinity_mq.messages import Version
from trinity_mq.runtime.errors import FatalError
from trinity_mq.sync.channels.base import label
from trinity_mq.sync.channels.buckets import Bucket, count, digest, raw

log = structlog.get_logger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
"""Format number of a version's folder."""
CHUNK_BYTES = 2**22
"""Number of bytes written and checksummed at a time, while they are in the cache."""
_FOLDER = re.compile(r"(\d+)\.(\d+)-[0-9a-f]{8}")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightFiles:
    """The versions in one root folder. Only folders with our naming pattern are ever touched.

    Raises:
        FatalError: No installed library opens the URL.
    """

    def __init__(self, root: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self._fs, self._root = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise FatalError(f"synchronizer.checkpoint_path: no library opens {root!r} here: {error}") from error
        self._root = self._root.rstrip("/")
        self._prefix = f"{root.partition('://')[0]}://" if "://" in root else ""
        self._is_local = is_local(self._fs)

    def write(
        self,
        version: Version,
        buckets: Iterable[Bucket],
        flats: Iterable[Tensor],
        written: Callable[[Tensor], None] = lambda flat: None,
    ) -> tuple[str, str]:
        """Write one shard per bucket, then the manifest. Return the version's folder or URL, and the manifest's
        checksum.

        ``written`` is called with the flat tensor of each bucket once its shard is written.

        Raises:
            OSError: The files could not be written. The partial files are not a version, and the next :meth:`prune`
                removes them.
        """
        folder = f"{self._root}/{label(version)}-{uuid.uuid4().hex[:8]}"
        if self._is_local:
            Path(folder).mkdir(parents=True)
        shards: list[dict[str, Any]] = []
        for number, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
            name = f"shard-{number:05d}.safetensors"
            size, checksum = self._put(f"{folder}/{name}", _shard(bucket, flat))
            shards.append({"name": name, "bytes": size, "xxh3_128": checksum})
            written(flat)
        body = json.dumps({"format": FORMAT, "version": list(version), "shards": shards}, indent=1).encode()
        _, checksum = self._put(f"{folder}/{MANIFEST}", [body])
        if self._is_local:
            _sync_folder(folder)
            _sync_folder(self._root)
        return f"{self._prefix}{folder}", checksum

    def prune(self, current: str, keep: int) -> None:
        """Remove all versions except ``current`` and the newest ``keep - 1`` complete versions before it. Folders that
        cannot be removed stay.

        Incomplete folders, later versions and other copies of a kept version, which failed attempts left, are removed
        too.
        """
        newest = self._version_of(current)
        self._fs.invalidate_cache()
        others = [path for path in self._folders() if path.rpartition("/")[2] != current.rpartition("/")[2]]
        folders = [(version, path) for path in others if (version := self._version_of(path)) is not None]
        before = {
            version: path
            for version, path in folders
            if newest is not None and version < newest and self._fs.exists(f"{path}/{MANIFEST}")
        }
        retained = {before[version] for version in sorted(before, reverse=True)[: keep - 1]}
        obsolete = [path for _, path in folders if path not in retained]
        for path in obsolete:
            try:
                self._fs.rm(path, recursive=True)
            except OSError as error:
                log.warning("old_weights_not_removed", path=path, reason=str(error))

    @staticmethod
    def _version_of(path: str) -> Version | None:
        match = _FOLDER.fullmatch(path.rpartition("/")[2])
        return (int(match[1]), int(match[2])) if match else None

    def _folders(self) -> list[str]:
        try:
            return [str(path).rstrip("/") for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _put(self, path: str, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Write a file completely or not at all; return size and checksum."""
        size, checksum = 0, xxhash.xxh3_128()
        folder, _, name = path.rpartition("/")
        target = f"{folder}/.{name}.part" if self._is_local else path
        with self._fs.open(target, "wb") as file:
            for part in parts:
                file.write(part)
                checksum.update(part)
                size += len(part)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        if self._is_local:
            Path(target).replace(path)
        return size, checksum.hexdigest()


def is_local(filesystem: Any) -> bool:
    """Return whether an fsspec filesystem is the local filesystem of this machine."""
    names = filesystem.protocol
    return "file" in ((names,) if isinstance(names, str) else names)


def _shard(bucket: Bucket, flat: Tensor) -> Iterator[bytes | memoryview]:
    """Yield a bucket as a safetensors file, without copying its tensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, _, shape in bucket.entries:
        size = count(shape) * bucket.dtype.itemsize
        header[name] = {"dtype": _NAMES[bucket.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires tensors to begin at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    body = raw(flat)
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checked(body: bytes | memoryview, expected: str, name: str) -> None:
    """Raise ValueError unless ``expected`` is the checksum of ``body``."""
    if (checksum := digest(body)) != expected:
        raise ValueError(f"{name} has checksum {checksum}, wanted {expected}")
