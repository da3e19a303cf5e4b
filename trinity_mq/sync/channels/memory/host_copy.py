"""A version's weights as flat buckets in host memory, not those that the trainer goes on to change."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from trinity_mq.messages import Version
from trinity_mq.sync.channels.base import ChannelError, Manifest
from trinity_mq.sync.channels.buckets import Bucket, SpareBuffers, digest, packed, plan, raw


@dataclass(slots=True)
class HostCopy:
    """One version. Filled in one thread, while others may read the buckets that are filled; what is whole does not
    change any more.
    """

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
    is_whole: bool = False
    """All buckets are filled."""
    _problem: ChannelError | None = None
    """Why it will never be whole."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buckets = plan(self.manifest, self.bucket_bytes)

    def take(self, tensors: Iterable[tuple[str, Tensor]], *, digests: bool) -> HostCopy:
        """Copy the tensors, bucket by bucket, with ``digests`` also those; blocks.

        Raises:
            ChannelError: They are not those of the manifest.
        """
        try:
            for flat in packed(self.buckets, tensors, empty=self.spare.take):
                with self._changed:
                    if self._problem is not None:
                        raise self._problem  # the buffers are not used again: somebody may still read them
                    self.flats.append(flat)
                    self._changed.notify_all()
                if digests:
                    self._digests.append(digest(raw(flat)))  # while it is in the cache
            with self._changed:
                self.is_whole = self._problem is None
                self._changed.notify_all()
        except Exception as error:
            self.fail(error)
            raise
        return self

    def fail(self, error: BaseException) -> None:
        """Say that the copy will never be whole; whoever reads it or fills it ends with that error."""
        problem = error if isinstance(error, ChannelError) else ChannelError(f"{type(error).__name__}: {error}")
        with self._changed:
            if not self.is_whole and self._problem is None:
                self._problem = problem
                self._changed.notify_all()

    @property
    def is_failed(self) -> bool:
        """It will never be whole."""
        return self._problem is not None

    def check(self) -> None:
        """Raise ChannelError if the copy will never be whole."""
        if self._problem is not None:
            raise self._problem

    def stream(self) -> Iterator[Tensor]:
        """Yield the buckets in order, each as soon as it is filled; blocks.

        Raises:
            ChannelError: The copy will never be whole.
        """
        flats = self.flats  # a release gives this copy another list
        for number in range(len(self.buckets)):
            with self._changed:
                while len(flats) <= number and self._problem is None:
                    self._changed.wait()
                if self._problem is not None:
                    raise self._problem
            yield flats[number]

    def release(self) -> None:
        """Give the buffers back, unless somebody reads or fills them: then they go when that has ended."""
        self.fail(ChannelError(f"the host copy of version {self.version} was abandoned"))
        if self.is_whole and not self.readers:
            self.spare.put(*self.flats)
        self.flats = []

    def digests(self) -> list[str]:
        """Return the checksum of each bucket; unless :meth:`take` has seen them, the first call reads all. Blocks."""
        flats, known = self.flats, self._digests
        if len(known) != len(flats):
            self._digests = known = [digest(raw(flat)) for flat in flats]
        return known
