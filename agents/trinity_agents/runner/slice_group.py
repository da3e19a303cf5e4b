"""Slices in one message: each slice is answered separately, and the message once all slices are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trinity_mq.bus import Bus, Delivery
from trinity_mq.bus.base import Answer
from trinity_mq.messages import CONTENT_TYPE, TaskSlice, encode
from trinity_mq.runtime.deliveries import DeliveryHistory, acknowledge, republish, requeue


class SliceGroup:
    """A delivery of several slices.

    Args:
        delivery: The delivery.
        slices: The slices in the delivery.
    """

    def __init__(self, delivery: Delivery, slices: Sequence[TaskSlice]) -> None:
        self._delivery, self._slices = delivery, slices
        self._unanswered = len(slices)
        self._must_requeue = False

    @property
    def deliveries(self) -> list[tuple[TaskSlice, Delivery]]:
        """Each slice with a separate delivery."""
        return [(task_slice, _SliceDelivery(self, self._delivery, task_slice)) for task_slice in self._slices]

    async def publish_separately(self, bus: Bus) -> None:
        """Publish each slice in a separate message, with headers about earlier deliveries, then acknowledge the group.

        If a slice has crashed the runners that had the message, it is then identified and does not affect the other
        slices. If this process dies before the acknowledgement, slices are delivered twice, and the readers of results
        drop the second result.
        """
        past = DeliveryHistory.of(self._delivery)
        apart = (republish(bus, delivery, past) for _, delivery in self.deliveries)
        if all(await asyncio.gather(*apart)):
            await acknowledge(self._delivery)
        else:
            await requeue(self._delivery)

    async def settle(self, answer: Answer) -> None:
        """Record the answer to one slice. The last answer settles the delivery.

        The delivery is requeued, and taken apart at its redelivery, if any slice was requeued.
        """
        self._unanswered -= 1
        self._must_requeue |= answer == "requeue"
        if self._unanswered:
            return
        await (self._delivery.requeue() if self._must_requeue else self._delivery.ack())


class _SliceDelivery(Delivery):
    """One slice of a group as a separate delivery."""

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
