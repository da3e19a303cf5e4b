"""Many tensors as few flat buckets of a set size: one transfer a bucket instead of one a tensor; spare buffers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError, ManifestEntry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of consecutive manifest entries of one dtype."""

    dtype: torch.dtype
    entries: tuple[ManifestEntry, ...]
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(self.num_elements, dtype=self.dtype, device=device)


class SpareBuffers:
    """Flat host buffers that nobody uses any more, to be filled again by the next version: fresh memory costs several
    times the copying into it. Threads may take and put at the same time.
    """

    def __init__(self, flats: Iterable[Tensor] = ()) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.put(*flats)

    def take(self, bucket: Bucket, device: torch.device | str = "cpu") -> Tensor:
        """Return a buffer for ``bucket``, not filled; on a device always a new one, since torch keeps spare ones."""
        if torch.device(device).type == "cpu":
            try:
                return self._free[bucket.dtype, bucket.num_elements].pop()
            except IndexError:
                pass
        return bucket.empty(device)

    def put(self, *flats: Tensor) -> None:
        """Give buffers back that nothing reads or writes any more."""
        for flat in flats:
            if flat.device.type == "cpu":
                self._free[flat.dtype, flat.numel()].append(flat)

    def clear(self) -> None:
        self._free.clear()


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
    return int(torch.Size(shape).numel())


def entries_of(raw: Iterable[Sequence[object]]) -> list[ManifestEntry]:
    """Return a manifest that came as JSON."""
    return [(str(name), str(dtype), list(shape)) for name, dtype, shape in raw]  # type: ignore[call-overload]


def plan(manifest: Iterable[ManifestEntry], bucket_bytes: int) -> list[Bucket]:
    """Cut the manifest into buckets of at most ``bucket_bytes`` (a larger tensor has its own), order kept."""
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


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor; one that is sharded over ranks is gathered, in which all of them take part."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


@torch.no_grad()
def packed(
    buckets: Iterable[Bucket],
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device | str = "cpu",
    empty: Callable[[Bucket, torch.device | str], Tensor] = Bucket.empty,
) -> Iterator[Tensor]:
    """Yield each bucket's tensors as one flat tensor of its dtype on ``device``, which ``empty`` makes; takes from
    ``tensors`` what is due.

    Every rank that holds shards of them runs this, in the same order; the others than rank 0 let go what they get.

    Raises:
        ChannelError: The tensors are others than the buckets', or come in another order.
    """
    source = iter(tensors)
    for bucket in buckets:
        flat = empty(bucket, device)
        for name, part in split(bucket, flat):
            found, tensor = next(source, ("nothing", None))
            if tensor is None or found != name:
                raise ChannelError(
                    f"weights come in another order than their manifest: {found!r} where {name!r} is due"
                )
            full = whole(tensor)
            if full.shape != part.shape:
                raise ChannelError(f"{name!r} has shape {list(full.shape)}, its manifest says {list(part.shape)}")
            part.copy_(full)
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
    """Return the bytes of a flat CPU tensor, not copied."""
    return flat.view(torch.uint8).numpy().data


def digest(data: memoryview | bytes) -> str:
    """Return the checksum (XXH3, 128 bits) that goes with weights on their way."""
    return xxhash.xxh3_128_hexdigest(data)


def total_digest(tensors: Iterable[Tensor]) -> str:
    """Return the checksum (XXH3, 128 bits) of the bytes of all tensors one after another: the same for a version's
    buckets, however it is cut into them, as for its tensors in the order of the manifest.
    """
    total = xxhash.xxh3_128()
    for tensor in tensors:
        total.update(raw(tensor.detach().cpu().contiguous().view(-1)))
    return total.hexdigest()


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items while a thread makes the next one: packing a bucket goes on while the last one is on the wire.

    At most three exist at a time, the one in use among them.
    """
    made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(1)
    left = threading.Event()

    def make() -> None:
        end: BaseException | None = None
        try:
            for item in items:
                made.put((item,))
                if left.is_set():
                    return
        except BaseException as error:
            end = error
        made.put(end)

    threading.Thread(target=make, name="packing", daemon=True).start()
    try:
        while (one := made.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one[0]
    finally:
        left.set()
        with contextlib.suppress(queue.Empty):
            made.get_nowait()  # whoever waits to put sees that nobody listens any more
