"""Acknowledgements of one channel, sent together where that says the same."""

from __future__ import annotations

import asyncio
import contextlib

from aiormq.channel import Channel

from trinity_mq.bus.rabbit.connection import BrokerConnectError, amqp_errors


class Acknowledgements:
    """Collects the acknowledgements of one turn of the event loop.

    One frame acknowledges all deliveries up to a tag, so it stands for those that are answered without a gap; behind a
    gap each has a frame of its own: what is done is never kept from the broker because something before it is not.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answered: set[int] = set()
        self._below = 1
        """All tags below are answered."""
        self._acks: list[int] = []
        self._sending: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """The channel is closed: its deliveries are void."""
        return self._channel.is_closed

    def ack(self, tag: int) -> None:
        """Acknowledge a delivery, soon."""
        self._acks.append(tag)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def reject(self, tag: int) -> None:
        """Hand a delivery to the dead-letter exchange. Raises LinkError."""
        self._answered.add(tag)
        with amqp_errors():
            await self._channel.basic_reject(tag, requeue=False, wait=False)

    async def requeue(self, tag: int) -> None:
        """Give a delivery back. Raises LinkError."""
        self._answered.add(tag)
        with amqp_errors():
            await self._channel.basic_nack(tag, requeue=True, wait=False)

    async def flush(self) -> None:
        """Return once everything is on its way, or the channel is gone."""
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        with contextlib.suppress(BrokerConnectError), amqp_errors():
            while self._acks:
                acks, self._acks = sorted(self._acks), []
                self._answered.update(acks)
                while self._below in self._answered:
                    self._answered.discard(self._below)
                    self._below += 1
                together = [tag for tag in acks if tag < self._below]
                if together:
                    await self._channel.basic_ack(together[-1], multiple=len(together) > 1, wait=False)
                for tag in acks[len(together) :]:
                    await self._channel.basic_ack(tag, wait=False)
