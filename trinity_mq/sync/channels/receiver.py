"""The engine's end of all channels: takes weights in by the method that a sync, or a pull, names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError, in_daemon_thread
from trinity_mq.sync.channels.buckets import SpareBuffers
from trinity_mq.sync.channels.checkpoint import fetch as checkpoint_fetch
from trinity_mq.sync.channels.collective import broadcast as collective
from trinity_mq.sync.channels.memory import fetch as memory_fetch

METHODS = ("collective", "checkpoint", "memory")


class Receiver:
    """One per process of an engine: it holds the group that the collective keeps between versions, and buffers."""

    def __init__(self) -> None:
        self._collective = collective.Receiver()
        self._spare = SpareBuffers()

    async def receive(self, spec: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors by name once all have arrived; no model is touched. The next call may write over them.

        Args:
            spec: ``method``, what the trainer's channel said of it, ``manifest`` and ``seconds``; for the collective
                also ``epoch``, ``attempt``, ``rank``, ``world``.

        Raises:
            ChannelError: They did not arrive in time, or are not what was sent.
        """
        method = _method_of(spec)
        # ours again only when all has arrived: what was given up may write into its buffers later
        spare, self._spare = self._spare, SpareBuffers()
        if method == "collective":
            tensors, flats = await self._collective.receive(spec, spare)
        else:
            seconds, name = float(spec["seconds"]) + 1.0, f"receive by {method}"
            tensors, flats = await in_daemon_thread(lambda: _fetch(method, spec, spare), seconds, name)
        self._spare = SpareBuffers(flats)
        return tensors

    def receive_blocking(self, spec: dict[str, Any]) -> dict[str, Tensor]:
        """Receive in this thread, for a process without an event loop, into new memory; see :meth:`receive`."""
        method = _method_of(spec)
        if method == "collective":
            return self._collective.receive_blocking(spec)
        return _fetch(method, spec, SpareBuffers())[0]


def _fetch(method: str, spec: dict[str, Any], spare: SpareBuffers) -> tuple[dict[str, Tensor], list[Tensor]]:
    return memory_fetch.fetch(spec, spare) if method == "memory" else (checkpoint_fetch.fetch(spec), [])


def _method_of(spec: dict[str, Any]) -> str:
    method = str(spec.get("method", "collective"))
    if method not in METHODS:
        raise ChannelError(
            f"the trainer sends weights by {method!r}, which this engine does not know; it knows "
            f"{', '.join(METHODS)}: run the same version of trinity-mq everywhere"
        )
    return method


_RECEIVER = Receiver()


async def receive_weights(spec: dict[str, Any]) -> dict[str, Tensor]:
    return await _RECEIVER.receive(spec)
