"""A version's weights as flat buckets in host memory, separate from the live weights that the trainer keeps
changing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import ChannelError, Manifest, Tensors
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, digest, packed, plan, raw, split


@dataclass(slots=True)
class HostCopy:
    """Host copy of one version. One thread fills it, while other threads may read the filled buckets. A complete copy
    does not change any more.
    """

    version: Version
    manifest: Manifest
    bucket_bytes: int
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    """Pool of the buffers. A released copy returns its buffers to the pool."""
    readers: int = 0
    """Number of requests that read the buffers now. The buffers must not change while a request reads them."""
    buckets: list[Bucket] = field(init=False)
    flats: list[Tensor] = field(default_factory=list)
    """One flat CPU tensor for each bucket that is filled; empty after :meth:`release`."""
    is_whole: bool = False
    """Whether all buckets are filled."""
    _problem: ChannelError | None = None
    """Reason why the copy will never be complete; None while it may still become complete."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buckets = plan(self.manifest, self.bucket_bytes)

    def take(self, tensors: Iterable[tuple[str, Tensor]], *, digests: bool) -> HostCopy:
        """Copy the tensors bucket by bucket, and compute the checksums too if ``digests``. Blocks.

        Raises:
            ChannelError: The tensors do not match the manifest, or the copy was marked as failed in the meantime.
        """
        try:
            for flat in packed(self.buckets, tensors, empty=self.spare.take):
                with self._changed:
                    self.check()  # do not reuse the buffers after a failure: a reader may still use them
                    self.flats.append(flat)
                    self._changed.notify_all()
                if digests:
                    self._digests.append(digest(raw(flat)))  # while the bucket is in the cache
            with self._changed:
                self.is_whole = self._problem is None
                self._changed.notify_all()
        except Exception as error:
            self.fail(error)
            raise
        return self

    def fail(self, error: BaseException) -> None:
        """Mark the copy as failed: it will never be complete. Its readers and its writer get this error."""
        problem = error if isinstance(error, ChannelError) else ChannelError(f"{type(error).__name__}: {error}")
        with self._changed:
            if not self.is_whole and self._problem is None:
                self._problem = problem
                self._changed.notify_all()

    @property
    def is_failed(self) -> bool:
        """Whether the copy will never be complete."""
        return self._problem is not None

    def check(self) -> None:
        """Raise ChannelError if the copy will never be complete."""
        if self._problem is not None:
            raise self._problem

    def tensors(self) -> Tensors:
        """Return the tensors of a complete copy in the order of the manifest, as views."""
        return [pair for bucket, flat in zip(self.buckets, self.flats, strict=True) for pair in split(bucket, flat)]

    def stream(self) -> Iterator[Tensor]:
        """Yield the buckets in order, each as soon as it is filled; blocks.

        Raises:
            ChannelError: The copy will never be complete.
        """
        flats = self.flats  # release() replaces the list of this copy
        for number in range(len(self.buckets)):
            with self._changed:
                while len(flats) <= number and self._problem is None:
                    self._changed.wait()
                self.check()
            yield flats[number]

    def release(self) -> None:
        """Mark an incomplete copy as failed. Return the buffers of a complete copy to the pool, unless a request reads
        them. All other buffers are freed after their last use.
        """
        self.fail(ChannelError(f"the host copy of version {self.version} was abandoned"))
        if self.is_whole and not self.readers:
            self.spare.put(*self.flats)
        self.flats = []

    def digests(self) -> list[str]:
        """Return the checksum of each bucket. If :meth:`take` did not compute them, the first call reads all buckets.
        Blocks.
        """
        flats, digests = self.flats, self._digests
        if len(digests) != len(flats):
            self._digests = digests = [digest(raw(flat)) for flat in flats]
        return digests
