"""The channel protocol for weights from trainer to engines, with its types and errors. Does not import torch."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from trinity_mq.bus.retry import backoff
from trinity_mq.messages import Version
from trinity_mq.runtime.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
ManifestEntry = tuple[str, str, list[int]]
"""``(name, dtype, shape)``, with a dtype such as ``"float32"``."""
Manifest = list[ManifestEntry]
Tensors = list[tuple[str, "Tensor"]]
"""Tensors in the order of the manifest. A tensor with the method ``full_tensor`` is gathered when its turn comes."""
CatchUpSource = tuple[Version, dict[str, Any], Manifest]
"""A committed version, its location (as in the field ``rendezvous`` of ``prepare``), and its manifest."""

SLOWEST_RATE = 50 * 10**6
"""Slowest acceptable rate of a transfer in bytes per second: two fifths of the rate of a link of 1 Gbit/s, and an
eighth of the rate of a disk. Deadlines of transfers allow for this rate in addition to ``synchronizer.sync_timeout``.
"""
FETCH_TRIES = 3
"""Maximum attempts to fetch one file or bucket."""
STAGING_TRIES = 10
"""Factor by which the limit of a phase is multiplied for staging weights while the engines serve, because a disk may be
slow."""


_BITS = re.compile(r"[0-9]+")


def manifest_bytes(manifest: Iterable[ManifestEntry]) -> int:
    """Return the number of bytes of all tensors. The first number in a dtype's name is its size in bits; a dtype
    without a number (``bool``) has 8 bits.
    """
    total = 0
    for _, dtype, shape in manifest:
        bits = _BITS.search(dtype)
        total += math.prod(shape) * max(8, int(bits.group()) if bits else 8) // 8
    return total


def source_copies(method: str, members: int) -> int:
    """Return the number of times that the source sends the weights for ``members`` engines.

    A broadcast is a binomial tree, whose root sends to one engine per level. Otherwise every engine fetches from the
    same server or disk.
    """
    return max(1, members.bit_length() if method == "collective" else members)


def transfer_seconds(base: float, num_bytes: int, copies: int = 1) -> float:
    """Return the deadline in seconds for moving ``num_bytes`` from one source ``copies`` times: ``base``, the limit of
    a phase that moves no data, plus the duration at :data:`SLOWEST_RATE`.
    """
    return base + num_bytes * copies / SLOWEST_RATE


class ChannelError(Exception):
    """Weights could not be transferred; the message says where and why. No model of an engine has changed yet."""


class Channel(Protocol):
    """The trainer's end of a weight channel. The members' end is
    :class:`trinity_mq.sync.channels.receiver.WeightReceiver`.
    """

    async def offer(self, version: Version, tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
        """Prepare ``version`` for the transfer while the engines keep serving. Called before each attempt's
        ``prepare``.

        Return the instructions for a member: ``method``, and the fields of this method.

        Raises:
            ChannelError: The version cannot be prepared, for example because the disk is full.
        """

    async def broadcast(self, tensors: Tensors, manifest: Manifest, epoch: int, attempt: int, world: int) -> None:
        """Run the trainer's part of the collective, once ``world - 1`` members wait. Do nothing if members fetch by
        themselves.

        Raises:
            ChannelError: The broadcast failed; the next attempt needs a new epoch.
        """

    async def committed(self, version: Version, tensors: Tensors, manifest: Manifest) -> None:
        """Make the committed ``version`` the result of :meth:`catch_up_source`, if it is the version that was offered
        last, and drop the versions that no engine needs any more.
        """

    async def catch_up_source(self) -> CatchUpSource | None:
        """Return the source from which a single member can fetch the last committed version at any time; None before
        the first commit.
        """

    def abandon(self) -> None:
        """Discard everything that a failed attempt has touched."""

    async def close(self) -> None:
        """Close the channel for good."""


async def in_daemon_thread(work: Callable[[], T], seconds: float, name: str) -> T:
    """Run ``work`` on a separate daemon thread; abandon the thread after ``seconds``.

    Raises:
        ChannelError: The time limit passed, or the work failed.
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
    """Return the retry policy for one file or bucket, which may appear late or be lost on a network. It retries on
    ``errors``, and raises the error of the last attempt.
    """
    return Retrying(
        retry=retry_if_exception_type(errors),
        wait=backoff(0.1, 2.0),
        stop=stop_after_attempt(FETCH_TRIES),
        reraise=True,
    )


def label(version: Version) -> str:
    """Return the form of a version in folder names and URLs."""
    return f"{version[0]}.{version[1]}"
