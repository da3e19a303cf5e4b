"""A version's weights as flat buckets in host memory, not those that the trainer goes on to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import Manifest
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, digest, packed, plan, raw


@dataclass(slots=True)
class HostCopy:
    """One version. Filled in one thread; what is whole does not change any more."""

    version: Version
    manifest: Manifest
    bucket_bytes: int
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    """Pool that buffers are taken from and, once the copy is released, returned to."""
    readers: int = 0
    """Number of readers that stream it now; its buffers must not change meanwhile."""
    buckets: list[Bucket] = field(init=False)
    flats: list[Tensor] = field(default_factory=list)
    """One a bucket, on the CPU."""
    _digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buckets = plan(self.manifest, self.bucket_bytes)

    def take(self, tensors: Iterable[tuple[str, Tensor]], *, digests: bool) -> HostCopy:
        """Copy the tensors, bucket by bucket, with ``digests`` also those; blocks.

        Raises:
            ChannelError: They are not those of the manifest.
        """
        for flat in packed(self.buckets, tensors, empty=self.spare.take):
            self.flats.append(flat)
            if digests:
                self._digests.append(digest(raw(flat)))  # while it is in the cache
        return self

    def release(self) -> None:
        """Give the buffers back, unless somebody reads them: then they go when that has ended."""
        if not self.readers:
            self.spare.put(*self.flats)
        self.flats = []

    def digests(self) -> list[str]:
        """Return the checksum of each bucket; unless :meth:`take` has seen them, the first call reads all. Blocks."""
        flats, known = self.flats, self._digests
        if len(known) != len(flats):
            self._digests = known = [digest(raw(flat)) for flat in flats]
        return known
