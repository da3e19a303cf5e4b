"""Creates the weight channel of a run. Does not import torch by itself."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.config import Config
from trinity_mq.runtime.errors import FatalError
from trinity_mq.sync.channels.base import Channel


def weights_folder(config: Config) -> str:
    """Return the folder or URL that contains the versions as files."""
    if shared := config.synchronizer.checkpoint_path:
        folder = f"{shared}/{config.name}"  # several runs may share the folder, and each removes its old versions
        return folder if "://" in folder else str(Path(folder).expanduser().absolute())
    return str((config.path / "weights").absolute())


def open_channel(config: Config) -> Channel:
    """Return the channel for ``synchronizer.sync_method``. Nothing is opened or written yet.

    Raises:
        FatalError: No installed library opens the URL in ``synchronizer.checkpoint_path``, or ``synchronizer.backend``
            is nccl and this process cannot use it.
    """
    from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
    from trinity_mq.sync.channels.collective.broadcast import nccl_missing
    from trinity_mq.sync.channels.collective.channel import CollectiveChannel
    from trinity_mq.sync.channels.memory.channel import MemoryChannel

    sync = config.synchronizer
    files_or_memory: CheckpointChannel | MemoryChannel
    if sync.pull_method == "checkpoint":
        files_or_memory = CheckpointChannel(weights_folder(config), sync.bucket_bytes, sync.sync_timeout)
    else:
        files_or_memory = MemoryChannel(sync.host, sync.bucket_bytes, sync.sync_timeout)
    if sync.sync_method == "collective":
        if sync.backend == "nccl" and (missing := nccl_missing()) is not None:
            raise FatalError(missing)
        return CollectiveChannel(sync.host, sync.bucket_bytes, sync.sync_timeout, sync.backend, files_or_memory)
    return files_or_memory
