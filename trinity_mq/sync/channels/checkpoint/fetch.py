"""The engine's end of the checkpoint channel: verifies and opens one shard after another. Blocks."""

from __future__ import annotations

import json
import mmap
import re
import time
from typing import Any

from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError, fetch_tries
from trinity_mq.sync.channels.buckets import entries_of
from trinity_mq.sync.channels.checkpoint.files import FORMAT, MANIFEST, checked, is_local

_SHARD = re.compile(r"shard-\d+\.safetensors")


def fetch(spec: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by name after verifying every file. Local files are memory-mapped, not read into memory.

    ``spec``: path, digest, manifest, seconds.

    Raises:
        ChannelError: A file is missing, differs from the written content, does not match the manifest or has another
            format, or not all files were read within ``seconds``.
    """
    from fsspec.core import url_to_fs

    ends = time.monotonic() + float(spec["seconds"])
    try:
        filesystem, folder = url_to_fs(spec["path"])
    except (ImportError, ValueError) as error:
        raise ChannelError(f"no library opens {spec['path']!r} in the engine: {error}") from error
    tries = fetch_tries(OSError, ValueError)
    tensors: dict[str, Tensor] = {}
    name = MANIFEST
    try:
        for shard in tries(_manifest, filesystem, f"{folder}/{name}", spec["digest"]):
            if time.monotonic() > ends:
                raise ChannelError(f"{spec['path']}: not all weights were read in time")
            name = shard["name"]
            tensors.update(tries(_shard, filesystem, f"{folder}/{name}", shard))
    except (OSError, ValueError) as error:
        raise ChannelError(f"{spec['path']}/{name} cannot be used: {type(error).__name__}: {error}") from error
    _compare(tensors, spec)
    return tensors


def _manifest(filesystem: Any, path: str, expected: str) -> list[dict[str, Any]]:
    body = filesystem.cat_file(path)
    checked(body, expected, MANIFEST)
    manifest = json.loads(body)
    if (format_number := manifest.get("format", FORMAT)) != FORMAT:
        raise ChannelError(
            f"{path} has format {format_number!r}, this release reads {FORMAT}: run trainer and engines from releases "
            "that share a format (docs/upgrading.md)"
        )
    shards: list[dict[str, Any]] = manifest["shards"]
    for shard in shards:
        if not _SHARD.fullmatch(shard["name"]):
            raise ValueError(f"{shard['name']!r} is not the name of a shard")
    return shards


def _shard(filesystem: Any, path: str, shard: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors.torch import load, load_file

    tensors: dict[str, Tensor]
    if is_local(filesystem):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
            view = memoryview(body)
            try:
                checked(view, shard["xxh3_128"], shard["name"])
            finally:
                view.release()
        tensors = load_file(path)
    else:
        data = filesystem.cat_file(path)
        checked(data, shard["xxh3_128"], shard["name"])
        tensors = load(data)
    return tensors


def _compare(tensors: dict[str, Tensor], spec: dict[str, Any]) -> None:
    expected = {name: (dtype, shape) for name, dtype, shape in entries_of(spec["manifest"])}
    actual = {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}
    if expected != actual:
        first = next(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
        raise ChannelError(
            f"{spec['path']}: {first!r} is {actual.get(first)}, the manifest of the sync says {expected.get(first)}"
        )
