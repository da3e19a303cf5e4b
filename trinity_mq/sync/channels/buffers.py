"""Buffers that are filled again by the next version: fresh memory costs several times the copying into it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from trinity_mq.sync.channels.buckets import Bucket


class SpareBuffers:
    """Flat host buffers that nobody uses any more. Threads may take and put at the same time."""

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
        """Let the memory go."""
        self._free.clear()
