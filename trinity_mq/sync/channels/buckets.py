"""Packs many tensors into few flat buckets of a set size, so that each transfer carries a bucket instead of a tensor.
Also holds spare buffers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch
import xxhash
from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError, ManifestEntry

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive manifest entries of one dtype, which one flat tensor holds."""

    dtype: torch.dtype
    entries: tuple[ManifestEntry, ...]
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(self.num_elements, dtype=self.dtype, device=device)


class SpareBuffers:
    """Unused flat host buffers that the next version fills again, because allocating memory takes several times as long
    as copying into it. Thread-safe.

    Args:
        flats: First buffers.
        pinned: Pin new buffers if this process uses a GPU, so that copies from and to the GPU take a fraction of the
            time. Pinning takes longer than the first copy, so it pays only for buffers that are reused.
    """

    def __init__(self, flats: Iterable[Tensor] = (), *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.put(*flats)

    def take(self, bucket: Bucket, device: torch.device | str = "cpu") -> Tensor:
        """Return an uninitialised buffer for ``bucket``. On a device the buffer is always new, because torch caches
        device memory.
        """
        if torch.device(device).type == "cpu":
            try:
                return self._free[bucket.dtype, bucket.num_elements].pop()
            except IndexError:
                pass
            if self._pinned and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                try:
                    return torch.empty(bucket.num_elements, dtype=bucket.dtype, pin_memory=True)
                except RuntimeError as error:
                    self._pinned = False
                    log.warning("host_memory_not_pinned", num_bytes=bucket.num_bytes, reason=str(error))
        return bucket.empty(device)

    def put(self, *flats: Tensor) -> None:
        """Return buffers to the pool. The caller must not read or write them any more."""
        for flat in flats:
            if flat.device.type == "cpu":
                self._free[flat.dtype, flat.numel()].append(flat)

    def clear(self) -> None:
        self._free.clear()


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``.

    Raises:
        ValueError: No dtype has this name.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"manifest names dtype {name!r}, which torch does not have")
    return dtype


def count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def entries_of(raw: Iterable[Sequence[object]]) -> list[ManifestEntry]:
    """Return a manifest from its parsed JSON form."""
    return [(str(name), str(dtype), list(shape)) for name, dtype, shape in raw]  # type: ignore[call-overload]


def plan(manifest: Iterable[ManifestEntry], bucket_bytes: int) -> list[Bucket]:
    """Divide the manifest into buckets of at most ``bucket_bytes``, in order. A larger tensor gets its own bucket."""
    buckets: list[Bucket] = []
    entries: list[ManifestEntry] = []
    size = 0
    for entry in manifest:
        dtype, elements = dtype_of(entry[1]), count(entry[2])
        if entries and (entries[0][1] != entry[1] or (size + elements) * dtype.itemsize > bucket_bytes):
            buckets.append(Bucket(dtype_of(entries[0][1]), tuple(entries), size))
            entries, size = [], 0
        entries.append(entry)
        size += elements
    if entries:
        buckets.append(Bucket(dtype_of(entries[0][1]), tuple(entries), size))
    return buckets


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. A sharded tensor is gathered by its method ``full_tensor``, and all of its
    ranks must take part.
    """
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


@torch.no_grad()
def packed(
    buckets: Iterable[Bucket],
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device | str = "cpu",
    empty: Callable[[Bucket, torch.device | str], Tensor] = Bucket.empty,
) -> Iterator[Tensor]:
    """Yield each bucket's tensors as one flat tensor of its dtype on ``device``, created by ``empty``. Consume
    ``tensors`` as needed.

    Reading a sharded tensor gathers it, see :func:`gathered`: the other ranks take part, in the same order.

    Raises:
        ChannelError: The tensors are not the tensors of the buckets, or come in another order.
    """
    source = iter(tensors)
    for bucket in buckets:
        flat = empty(bucket, device)
        pinned, copied_from = flat.is_pinned(), None
        for name, part in split(bucket, flat):
            tensor_name, tensor = next(source, ("nothing", None))
            if tensor is None or tensor_name != name:
                raise ChannelError(
                    f"weights do not follow the order of their manifest: got {tensor_name!r}, wanted {name!r}"
                )
            full = gathered(tensor)
            if full.shape != part.shape:
                raise ChannelError(f"{name!r} has shape {list(full.shape)}, its manifest says {list(part.shape)}")
            part.copy_(full, non_blocking=pinned)
            if pinned and full.is_cuda:
                copied_from = full.device
        if copied_from is not None:
            torch.cuda.current_stream(copied_from).synchronize()
        yield flat


def fill(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    """Return the bucket's tensors as one flat CPU tensor."""
    return next(packed([bucket], ((name, tensors[name]) for name, _, _ in bucket.entries)))


def split(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a filled bucket, as views."""
    start = 0
    for name, _, shape in bucket.entries:
        size = count(shape)
        yield name, flat[start : start + size].view(shape)
        start += size


def raw(flat: Tensor) -> memoryview:
    """Return the bytes of a flat CPU tensor, without a copy."""
    return flat.view(torch.uint8).numpy().data


def digest(data: memoryview | bytes) -> str:
    """Return the checksum (XXH3, 128 bits) for weights in transit."""
    return xxhash.xxh3_128_hexdigest(data)


def total_digest(tensors: Iterable[Tensor]) -> str:
    """Return the checksum (XXH3, 128 bits) of the bytes of all tensors in order. The buckets of a version, whatever
    their size, have the same checksum as its tensors in the order of the manifest.
    """
    total = xxhash.xxh3_128()
    for tensor in tensors:
        total.update(raw(tensor.detach().cpu().contiguous().view(-1)))
    return total.hexdigest()


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield the items while a thread produces the next item, so that a bucket is packed while the previous bucket is on
    the wire.

    At most three items exist at a time, including the item in use.
    """
    made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(1)
    is_abandoned = threading.Event()

    def make() -> None:
        end: BaseException | None = None
        try:
            for item in items:
                made.put((item,))
                if is_abandoned.is_set():
                    return
        except BaseException as error:
            end = error
        made.put(end)

    threading.Thread(target=make, name="packing", daemon=True).start()
    try:
        while (entry := made.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        is_abandoned.set()
        with contextlib.suppress(queue.Empty):
            made.get_nowait()  # lets a producer blocked in put() see that the consumer has left
