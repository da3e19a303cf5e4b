"""The channel protocol by which weights travel from trainer to engines, with its types and errors. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from trinity_mq.messages import Version
from trinity_mq.runtime.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
ManifestEntry = tuple[str, str, list[int]]
"""``(name, dtype, shape)``, dtype as in ``"float32"``."""
Manifest = list[ManifestEntry]
Tensors = list[tuple[str, "Tensor"]]
"""In the order of the manifest; a DTensor is gathered when it is its turn."""
CatchUpSource = tuple[Version, dict[str, Any], Manifest]
"""Version on offer, its location (the rendezvous of ``prepare``), and its manifest."""

FETCH_TRIES = 3
"""Tries of one file or bucket."""
STAGING_TRIES = 10
"""Staging weights, while the engines serve, may take so many times the limit of a phase: a disk may be slow."""


class ChannelError(Exception):
    """Weights could not be transferred; the message says where and why. The receiver has changed nothing yet."""


class Channel(Protocol):
    """The trainer's end. The members' end is :class:`trinity_mq.sync.channels.receiver.Receiver`."""

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Get ``version`` ready to travel, while the engines serve on; called before each try's ``prepare``.

        Returns what a member needs to get it: ``method`` and what that method wants.

        Raises:
            ChannelError: It cannot be got ready, such as for a full disk.
        """

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Do our part once ``world - 1`` members wait: the collective. Nothing where members fetch by themselves.

        Raises:
            ChannelError: It failed; the next try needs a new epoch.
        """

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """``version``, offered last, is committed: keep what :meth:`catch_up_source` speaks of, let older ones go."""

    async def catch_up_source(self) -> CatchUpSource | None:
        """Return where one member alone gets the last committed version, at any time; None: nothing is committed."""

    def abandon(self) -> None:
        """Use nothing again that a failed try has touched."""

    async def close(self) -> None:
        """End for good."""


async def in_daemon_thread(work: Callable[[], T], seconds: float, name: str) -> T:
    """Run ``work`` on a daemon thread of its own; abandon it after ``seconds``.

    Raises:
        ChannelError: Time ran out, or the work failed.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await in_thread(work, name)
    except ChannelError:
        raise
    except Exception as error:
        reason = f"{name} did not end within {seconds:g} s" if limit.expired() else f"{type(error).__name__}: {error}"
        raise ChannelError(reason) from error


def fetch_tries(*errors: type[Exception]) -> Retrying:
    """Return the retry of one file or bucket, which a network may show late or lose; raises the last of ``errors``."""
    return Retrying(
        retry=retry_if_exception_type(errors),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        stop=stop_after_attempt(FETCH_TRIES),
        reraise=True,
    )


def label(version: Version) -> str:
    """Return a version as it stands in names of folders and in URLs."""
    return f"{version[0]}.{version[1]}"
