"""The checkpoint channel: carries weights as files that both trainer and engines can access."""

from __future__ import annotations

from typing import Any

import structlog

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import (
    STAGING_TRIES,
    CatchUpSource,
    ChannelError,
    Manifest,
    Tensors,
    in_daemon_thread,
    manifest_bytes,
    transfer_seconds,
)
from trinity_mq.sync.channels.buckets import SpareBuffers, packed, plan, prefetch
from trinity_mq.sync.channels.checkpoint.files import WeightFiles

log = structlog.get_logger(__name__)

KEPT_VERSIONS = 2
"""Number of weight versions kept as files, including the newest: an engine may still read the previous version."""


class CheckpointChannel:
    """Writes each version before the offer; members read it by themselves.

    Args:
        root: Folder or fsspec URL that contains the versions.
        bucket_bytes: Size of a shard.
        seconds: Limit of a phase of an attempt.
        keep: Number of versions to keep.
    """

    def __init__(self, root: str, bucket_bytes: int, seconds: float, *, keep: int = KEPT_VERSIONS) -> None:
        self._files = WeightFiles(root)
        self._root, self._bucket_bytes, self._seconds, self._keep = root, bucket_bytes, seconds, keep
        self._offered: CatchUpSource | None = None
        self._committed: CatchUpSource | None = None
        self._spare = SpareBuffers(pinned=True)

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Write the files, unless this version is the last that was written and was not abandoned. Return their
        location.
        """
        if self._offered is None or self._offered[0] != version:
            self._offered = None
            buckets = plan(manifest, self._bucket_bytes)

            def write() -> tuple[str, str]:
                flats = prefetch(packed(buckets, tensors, empty=self._spare.take))
                return self._files.write(version, buckets, flats, self._spare.put)

            try:
                seconds = transfer_seconds(self._seconds * STAGING_TRIES, manifest_bytes(manifest))
                path, digest = await in_daemon_thread(write, seconds, "writing the weights")
            except ChannelError as error:
                raise ChannelError(
                    f"version {version} cannot be written below {self._root}: {error}; check space and permissions "
                    "there (synchronizer.checkpoint_path)"
                ) from error
            self._offered = (version, {"method": "checkpoint", "path": path, "digest": digest}, manifest)
        return self._offered[1]

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Do nothing: members fetch by themselves."""

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """Make the files of ``version`` the source of catch-up fetches, if it was offered last. Remove the files of all
        other versions except the newest earlier versions, as many as configured.
        """
        if self._offered is None or self._offered[0] != version:
            return
        self._committed = self._offered
        try:
            path = self._committed[1]["path"]
            await in_daemon_thread(lambda: self._files.prune(path, self._keep), self._seconds, "pruning")
        except ChannelError as error:
            log.warning("old_weights_not_removed", root=self._root, reason=str(error))

    async def catch_up_source(self) -> CatchUpSource | None:
        return self._committed

    def abandon(self) -> None:
        """Forget the offered files, so that the next attempt writes the version again: the files may be the cause of
        the failure.
        """
        self._offered = None

    async def close(self) -> None:
        """Leave the files in place: engines may be reading them."""
