"""One host copy of arriving weights for all workers of an engine: worker 0 receives them into memory that the other
workers map.

The memory belongs to no file system, so its size is not limited by ``/dev/shm``. The kernel frees it with the last
mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, entries_of, plan, split

ALIGNMENT = 64
"""Bytes to which the start of each bucket is aligned."""


class Workers(Protocol):
    """The workers of one engine, from the view of a single worker. All run on one machine, and call the methods in the
    same order.
    """

    number: int
    """Number of this worker, from 0."""

    def broadcast(self, value: Any) -> Any:
        """Return the ``value`` that worker 0 passed."""

    def barrier(self) -> None:
        """Return when all workers have called this."""


class SharedBuffers(SpareBuffers):
    """Buffers for ``buckets``, taken in this order, in memory that other processes of the machine can map."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self._descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        size = max(1, sum(map(_room, buckets)))
        os.ftruncate(self._descriptor, size)
        self._flats = _flats(buckets, mmap.mmap(self._descriptor, size))

    @property
    def path(self) -> str:
        """Path under which other processes of this user open the memory, until :meth:`close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def take(self, bucket: Bucket, device: torch.device | str = "cpu") -> Tensor:
        """Return the buffer of the next bucket; ``device`` must be the CPU."""
        return next(self._flats)

    def close(self) -> None:
        """Let no further process map the memory. The buffers stay valid."""
        os.close(self._descriptor)


def _room(bucket: Bucket) -> int:
    return -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT


def _flats(buckets: Iterable[Bucket], memory: mmap.mmap) -> Iterator[Tensor]:
    """Yield the buffer of each bucket in one mapping, because each mapping holds a descriptor open."""
    start = 0
    for bucket in buckets:
        if bucket.num_elements:
            yield torch.frombuffer(memory, dtype=bucket.dtype, count=bucket.num_elements, offset=start)
        else:
            yield bucket.empty()
        start += _room(bucket)


def mapped(path: str, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """Return the tensors, by name, that another process has received into :class:`SharedBuffers` at ``path``."""
    with open(path, "rb") as file:
        # a private mapping, because torch wants memory that may be written
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    pairs = zip(buckets, _flats(buckets, memory), strict=True)
    return {name: part for bucket, flat in pairs for name, part in split(bucket, flat)}


def receive_shared(
    spec: dict[str, Any], workers: Workers, receive: Callable[[SpareBuffers], dict[str, Tensor]], *, all_join: bool
) -> dict[str, Tensor]:
    """Return the tensors by name, in memory that all workers share.

    Args:
        spec: Describes the transfer: manifest, bucket_bytes.
        workers: The workers of the engine, which all call this.
        receive: Receives all tensors into buffers taken from its argument.
        all_join: Whether every worker takes part in the transfer. Only the tensors that worker 0 receives are used.

    Raises:
        ChannelError: Worker 0 received no weights. An error of this worker's own transfer is raised unchanged.
    """
    buckets = plan(entries_of(spec["manifest"]), int(spec["bucket_bytes"]))
    if workers.number == 0:
        return _received_for_all(workers, buckets, receive)
    problem: Exception | None = None
    if all_join:
        try:
            receive(SpareBuffers())
        except Exception as error:
            problem = error  # raised later: the workers stay in step
    path, failure = workers.broadcast(None)
    if failure:
        raise ChannelError(failure)
    try:
        tensors = mapped(path, buckets)
    finally:
        workers.barrier()
    if problem is not None:
        raise problem
    return tensors


def _received_for_all(
    workers: Workers, buckets: Sequence[Bucket], receive: Callable[[SpareBuffers], dict[str, Tensor]]
) -> dict[str, Tensor]:
    buffers = SharedBuffers(buckets)
    try:
        try:
            tensors = receive(buffers)
        except Exception as error:
            workers.broadcast(("", f"{type(error).__name__}: {error}"))
            raise
        workers.broadcast((buffers.path, ""))
        workers.barrier()
    finally:
        buffers.close()
    return tensors
