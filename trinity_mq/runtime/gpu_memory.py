"""Memory that torch's allocator keeps on a GPU which several processes share."""

from __future__ import annotations

import os
import sys

SHARED_VARIABLE = "TRINITY_MQ_SHARED_GPU"
"""Set to 1 in the environment of a process that shares its GPU with another process of the run."""


def shares_gpu() -> bool:
    """Return whether another process of the run uses this process's GPU."""
    return os.environ.get(SHARED_VARIABLE) == "1"


def release_cached_memory() -> None:
    """Release torch's unused memory to the GPU, if another process of the run uses this GPU too.

    Torch keeps freed memory for its next tensors. A restarted engine on the same GPU needs that memory. Without a
    shared GPU the call has no effect, because the next computation of this process needs the memory again.
    """
    torch = sys.modules.get("torch")
    if torch is not None and shares_gpu() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
