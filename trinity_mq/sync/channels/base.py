"""The channel protocol by which weights travel from trainer to engines, with its types and errors. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trinity_mq.messages import Version

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
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            known = isinstance(error, ChannelError)
            future.set_exception(error if known else ChannelError(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only when T is None

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # abandoned, and the loop has closed since

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError:
        raise ChannelError(f"{name} did not end within {seconds:g} s") from None


def label(version: Version) -> str:
    """Return a version as it stands in names of folders and in URLs."""
    return f"{version[0]}.{version[1]}"
