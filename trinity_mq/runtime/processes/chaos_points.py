"""Marked points inside an agent, at which ``trinity-mq chaos`` can stop its process: between the confirm of a publish
and the acknowledgement of the delivery that caused it, and after a checkpoint is written.

Without the environment variable :data:`POINTS_VARIABLE` nothing is wrapped, and :func:`pass_point` does nothing. No
message or request can set the variable.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_mq.bus import Bus, Consumer, Delivery, Envelope, Queue

POINTS_VARIABLE = "TRINITY_MQ_CHAOS_POINTS"
"""Environment variable with the folder in which points are armed; ``trinity-mq chaos`` sets it for the run that it
starts."""
ARMED, HIT = ".armed", ".hit"
"""Suffixes of file names in that folder. ``ROLE POINT.armed`` contains a token and an occurrence. The process that
stops renames it to ``TOKEN AGENT PID.hit``."""
SINGLE = {"task_results": "task_result", "task_slices": "task_slice"}
"""Kinds of container messages, with the kind of their contents. A container passes the points of its contents' kind."""


class MarkedPoints:
    """The points that are armed for one agent.

    Args:
        folder: Folder in which points are armed.
        role: The agent's role.
        agent_id: The agent's id.
        stop: Stops this process until it is continued.
    """

    def __init__(self, folder: Path, role: str, agent_id: str, stop: Callable[[], None] | None = None) -> None:
        self._folder, self._role, self._id, self._stop = folder, role, agent_id, stop or _stop
        self._counted: Counter[str] = Counter()

    def passed(self, name: str) -> None:
        """Stop here if this point is armed and its occurrence is reached."""
        armed = self._folder / f"{self._role} {name}{ARMED}"
        try:
            token, occurrence = armed.read_text().split()
            self._counted[token] += 1
            if self._counted[token] >= int(occurrence):
                # of several agents only one can rename the file
                armed.rename(self._folder / f"{token} {self._id} {os.getpid()}{HIT}")
                self._stop()
        except FileNotFoundError:
            return


_points: list[MarkedPoints] = []
"""The points of this agent; empty without the variable."""


def pass_point(name: str) -> None:
    """Stop this process here if the point ``name`` is armed; for a point that does not belong to a message."""
    for points in _points:
        points.passed(name)


def marked(bus: Bus, role: str, agent_id: str) -> None:
    """Wrap an agent's bus with marked points if the environment names a folder for them."""
    folder = os.environ.get(POINTS_VARIABLE)
    if folder:
        _points.append(MarkedPoints(Path(folder), role, agent_id))
        mark_bus(bus, _points[-1])


def mark_bus(bus: Bus, points: MarkedPoints) -> None:
    """Make each publish on a bus pass the point ``confirmed KIND``, and each acknowledgement of a delivery that is not
    from a stream the point ``acknowledging KIND``.
    """
    publish, consume = bus.publish, bus.consume

    async def publish_marked(exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        routed = await publish(exchange, routing_key, envelope, **how)
        points.passed(f"confirmed {_single_kind(envelope.kind)}")
        return routed

    async def consume_marked(queue: Queue, **how: Any) -> Consumer:
        return _MarkedConsumer(await consume(queue, **how), points)

    bus.publish, bus.consume = publish_marked, consume_marked  # type: ignore[method-assign]


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _single_kind(kind: str | None) -> str:
    return SINGLE.get(kind or "", kind or "")


class _MarkedConsumer(Consumer):
    """A consumer that passes a point just before each acknowledgement."""

    def __init__(self, inner: Consumer, points: MarkedPoints) -> None:
        self._inner, self._points = inner, points

    async def __anext__(self) -> Delivery:
        return self._marked(await self._inner.__anext__())

    def get_nowait(self) -> Delivery | None:
        delivery = self._inner.get_nowait()
        return None if delivery is None else self._marked(delivery)

    async def stop(self) -> None:
        await self._inner.stop()

    async def close(self) -> None:
        await self._inner.close()

    def _marked(self, delivery: Delivery) -> Delivery:
        if delivery.offset is not None:  # on a stream an acknowledgement has no effect
            return delivery
        ack, name = delivery.ack, f"acknowledging {_single_kind(delivery.kind)}"

        async def marked_ack() -> None:
            self._points.passed(name)
            await ack()

        delivery.ack = marked_ack  # type: ignore[method-assign]
        return delivery
