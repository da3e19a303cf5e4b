"""The engine's end of all channels: receives weights by the method that a sync or a catch-up fetch names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trinity_mq.sync.channels.base import ChannelError, in_daemon_thread
from trinity_mq.sync.channels.buckets import SpareBuffers
from trinity_mq.sync.channels.checkpoint import fetch as checkpoint_fetch
from trinity_mq.sync.channels.collective import broadcast as collective
from trinity_mq.sync.channels.memory import fetch as memory_fetch
from trinity_mq.sync.channels.shared import Workers, receive_shared

METHODS = ("collective", "checkpoint", "memory")


class WeightReceiver:
    """Receives weights in one engine process. Holds the buffers, and the group that the collective keeps across
    versions.
    """

    def __init__(self) -> None:
        self._collective = collective.Receiver()
        self._spare = SpareBuffers()

    async def receive(self, spec: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors by name once all have arrived, without changing a model. The next call may overwrite the
        tensors.

        Args:
            spec: ``method``, the fields from the trainer's channel, ``manifest`` and ``seconds``. The collective also
                needs ``epoch``, ``attempt``, ``rank`` and ``world``.

        Raises:
            ChannelError: The tensors did not arrive in time, or differ from the sent tensors.
        """
        method = _method_of(spec)
        # reuse the buffers only after a complete transfer: an abandoned thread may still write into them
        spare, self._spare = self._spare, SpareBuffers()
        if method == "collective":
            tensors, flats = await self._collective.receive(spec, spare)
        else:
            seconds, name = float(spec["seconds"]) + 1.0, f"receive by {method}"
            tensors, flats = await in_daemon_thread(lambda: _fetch(method, spec, spare), seconds, name)
        self._spare = SpareBuffers(flats)
        return tensors

    def receive_blocking(self, spec: dict[str, Any], workers: Workers | None = None) -> dict[str, Tensor]:
        """Receive in this thread into new memory, for a process without an event loop; see :meth:`receive`.

        The ``workers`` of an engine share one copy in host memory. Files are mapped anyway, and with NCCL each worker
        has its own copy, on its device if there is room.
        """
        method = _method_of(spec)
        is_shared = method == "memory" or (method == "collective" and spec.get("backend", "gloo") == "gloo")
        if workers is None or not is_shared:
            return self._receive_into(method, spec, SpareBuffers())
        keep = workers.number == 0
        return receive_shared(
            spec,
            workers,
            lambda spare: self._receive_into(method, spec, spare, keep=keep),
            all_join=method == "collective",
        )

    def _receive_into(
        self, method: str, spec: dict[str, Any], spare: SpareBuffers, *, keep: bool = True
    ) -> dict[str, Tensor]:
        if method == "collective":
            return self._collective.receive_blocking(spec, spare, keep=keep)
        return _fetch(method, spec, spare)[0]


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


_RECEIVER = WeightReceiver()


async def receive_weights(spec: dict[str, Any]) -> dict[str, Tensor]:
    return await _RECEIVER.receive(spec)
