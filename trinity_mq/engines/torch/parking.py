"""Frees the device memory of tensors while another process uses the card, and fills it again."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
import torch
from torch import Tensor, UntypedStorage

log = structlog.get_logger(__name__)


class ParkedTensors:
    """Tensors whose memory is freed in place. They keep their identity, shape and device, so that models, tied weights
    and optimizer states stay as they are. Nothing may read them while they are parked.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[UntypedStorage, int, Tensor | None]] = []
        """Storages with their size in bytes, and their content in host memory if it is kept."""
        self._buffers: dict[int, list[Tensor]] = {}
        """Unused host buffers by size in bytes."""

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor], *, keep: bool = True) -> int:
        """Free the memory of ``tensors``. Return the number of bytes.

        Args:
            tensors: Tensors, possibly with shared memory. A tensor whose memory cannot be freed, because a file is
                mapped there, first gets memory of its own.
            keep: Copy the content to host memory, pinned for a GPU. Otherwise the content is lost.
        """
        storages: dict[int, UntypedStorage] = {}
        is_on_device = False
        for tensor in tensors:
            if not tensor.untyped_storage().resizable():
                tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        copied: list[tuple[UntypedStorage, int, Tensor | None]] = []
        for storage in storages.values():
            host = None
            if keep:
                host = self._buffer(storage.nbytes(), pinned=storage.device.type == "cuda")
                host.copy_(_as_bytes(storage), non_blocking=True)
            is_on_device |= storage.device.type == "cuda"
            copied.append((storage, storage.nbytes(), host))
        if is_on_device:
            torch.cuda.synchronize()
        for storage, _, _ in copied:
            storage.resize_(0)
        self._parked += copied
        if is_on_device:
            torch.cuda.empty_cache()  # the other process needs the memory
        return sum(size for _, size, _ in copied)

    @torch.no_grad()
    def unpark(self) -> None:
        """Give the tensors memory again, with their content if it was kept.

        Raises:
            torch.OutOfMemoryError: The device has not enough free memory. Call it again later.
        """
        is_on_device = False
        for storage, size, _ in self._parked:
            storage.resize_(size)
        for storage, _, host in self._parked:
            is_on_device |= storage.device.type == "cuda"
            if host is not None:
                _as_bytes(storage).copy_(host, non_blocking=True)
        if is_on_device:
            torch.cuda.synchronize()
        for _, size, host in self._parked:
            if host is not None:
                self._buffers.setdefault(size, []).append(host)
        self._parked.clear()

    def _buffer(self, size: int, *, pinned: bool) -> Tensor:
        if unused := self._buffers.get(size):
            return unused.pop()
        if pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                log.warning("host_memory_not_pinned", num_bytes=size, reason=str(error))
        return torch.empty(size, dtype=torch.uint8)


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
