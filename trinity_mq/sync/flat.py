"""Many tensors as few flat buffers of a set size: one broadcast a bucket instead of one a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

ManifestEntry = tuple[str, str, list[int]]
"""``(name, dtype, shape)``, dtype as in ``"float32"``."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of consecutive manifest entries of one dtype."""

    dtype: torch.dtype
    entries: tuple[ManifestEntry, ...]
    num_elements: int


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``.

    Raises:
        ValueError: There is none of that name.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"manifest names dtype {name!r}, which torch does not have")
    return found


def count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return int(torch.Size(shape).numel())


def plan(manifest: Iterable[ManifestEntry], bucket_bytes: int) -> list[Bucket]:
    """Cut the manifest into buckets of at most ``bucket_bytes`` (a larger tensor has its own), order kept."""
    buckets: list[Bucket] = []
    entries: list[ManifestEntry] = []
    size = 0
    for entry in manifest:
        elements = count(entry[2])
        num_bytes = elements * dtype_of(entry[1]).itemsize
        if entries and (entries[0][1] != entry[1] or (size + elements) * dtype_of(entry[1]).itemsize > bucket_bytes):
            buckets.append(Bucket(dtype_of(entries[0][1]), tuple(entries), size))
            entries, size = [], 0
        entries.append(entry)
        size += elements
        if num_bytes > bucket_bytes:
            buckets.append(Bucket(dtype_of(entry[1]), tuple(entries), size))
            entries, size = [], 0
    if entries:
        buckets.append(Bucket(dtype_of(entries[0][1]), tuple(entries), size))
    return buckets


def fill(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the bucket's tensors as one flat CPU tensor."""
    return torch.cat([tensors[name].detach().reshape(-1).to("cpu", bucket.dtype) for name, _, _ in bucket.entries])


def split(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of a filled bucket, as views."""
    start = 0
    for name, _, shape in bucket.entries:
        size = count(shape)
        yield name, flat[start : start + size].view(shape)
        start += size
