"""Slices that came in one message: each is answered as if it had come alone, the message once all of them are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trinity_mq.bus import Bus, Delivery
from trinity_mq.bus.base import Answer
from trinity_mq.messages import CONTENT_TYPE, TaskSlice, encode
from trinity_mq.runtime.deliveries import PastDeliveries, acknowledge, publish_again, requeue


class SliceGroup:
    """A delivery of several slices.

    Args:
        delivery: The delivery.
        slices: What is in it.
    """

    def __init__(self, delivery: Delivery, slices: Sequence[TaskSlice]) -> None:
        self._delivery, self._slices = delivery, slices
        self._left = len(slices)
        self._comes_again = False

    @property
    def deliveries(self) -> list[tuple[TaskSlice, Delivery]]:
        """Each slice with a delivery of its own."""
        return [(task_slice, _SliceDelivery(self, self._delivery, task_slice)) for task_slice in self._slices]

    async def take_apart(self, bus: Bus) -> None:
        """Publish each slice in a message of its own, with headers that tell of earlier deliveries, then acknowledge.

        One slice may have ended the runners that had the message: alone it is found, and takes no other along. If this
        process dies before the acknowledgement, slices come twice: the readers of results drop the second.
        """
        past = PastDeliveries.of(self._delivery)
        apart = (publish_again(bus, delivery, past) for _, delivery in self.deliveries)
        if all(await asyncio.gather(*apart)):
            await acknowledge(self._delivery)
        else:
            await requeue(self._delivery)

    async def settle(self, answer: Answer) -> None:
        """Take the answer to one slice. The last one answers the delivery: it comes again, to be taken apart, if that
        is wanted for any slice.
        """
        self._left -= 1
        self._comes_again |= answer == "requeue"
        if self._left:
            return
        await (self._delivery.requeue() if self._comes_again else self._delivery.ack())


class _SliceDelivery(Delivery):
    """One slice of a group, as a delivery of its own."""

    def __init__(self, group: SliceGroup, whole: Delivery, task_slice: TaskSlice) -> None:
        super().__init__(
            body=encode(task_slice),
            exchange=whole.exchange,
            routing_key=whole.routing_key,
            queue=whole.queue,
            message_id=task_slice.message_id,
            content_type=CONTENT_TYPE,
            headers={**whole.headers, "kind": task_slice.kind, "version": task_slice.version_number},
            deliveries_before=whole.deliveries_before,
        )
        self._group = group

    async def _settle(self, answer: Answer) -> None:
        await self._group.settle(answer)
