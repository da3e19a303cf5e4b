"""Takes the slices of one lane from their queue. The circuit breaker decides whether slices fill all slots, a single
slice is taken as a probe, or no slice is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_agents.runner.circuit import CircuitBreaker
from trinity_mq.bus import Bus, Consumer, Delivery, Queue
from trinity_mq.runtime.notify import Notifier


class LaneIntake:
    """Consumes the task queue of one lane.

    Args:
        bus: A connected bus.
        queue: The lane's queue.
        slots: Number of slices at a time, which is also the prefetch. Only short slices that share a message may have
            to wait after their delivery.
        circuit: Circuit breaker of the lane.
        start: Starts the work on a delivery and returns its task. The task ends once the delivery is answered, or once
            all other tasks that answer the delivery are tracked (:meth:`track`).
        woken: Notified when the circuit changes or the runner ends.
        is_over: Returns whether to stop consuming.
    """

    def __init__(
        self,
        bus: Bus,
        queue: Queue,
        slots: int,
        circuit: CircuitBreaker,
        *,
        start: Callable[[Delivery], asyncio.Task[None]],
        woken: Notifier,
        is_over: Callable[[], bool],
    ) -> None:
        self._bus, self._queue, self._slots, self.circuit = bus, queue, slots, circuit
        self._start, self._woken, self._is_over = start, woken, is_over
        self._work: set[asyncio.Task[None]] = set()
        """Tasks that have to answer a delivery of the lane."""
        self._stopped: list[Consumer] = []
        """Consumers that do not receive any more and may have unanswered deliveries."""
        self.taking = False
        """True while consuming, when a requeued delivery may be redelivered to this runner at once."""

    async def run(self) -> None:
        """Take slices until ``is_over`` returns True."""
        clock = asyncio.get_running_loop().time
        while not self._is_over():
            if not self._work:
                await self.close()
            if self.circuit.admits(clock()):
                await self._take()
            else:
                await self._woken.wait(self.circuit.seconds_left(clock()))

    def track(self, task: asyncio.Task[None]) -> None:
        """Keep the consumers open until ``task`` ends, because it has to answer a delivery of the lane."""
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def forget(self, task: asyncio.Task[None]) -> None:
        """Stop waiting for a task, because another task answers its delivery."""
        self._work.discard(task)

    async def close(self) -> None:
        """Close the consumers that receive no more; their unanswered deliveries return to the queue."""
        while self._stopped:
            await self._stopped.pop().close()

    async def _take(self) -> None:
        """Take slices while the circuit is closed, otherwise take one probe and wait for its result."""
        await self._woken.until(lambda: self._bus.usable or self._is_over())
        if self._is_over():
            return
        circuit = self.circuit
        probing, probes = not circuit.is_closed, circuit.probes
        consumer = await self._bus.consume(self._queue, prefetch=1 if probing else self._slots)
        self._stopped.append(consumer)
        self.taking = True
        probe: asyncio.Task[None] | None = None

        async def take() -> None:
            nonlocal probe
            async for delivery in consumer:
                task = self._start(delivery)
                self.track(task)
                if probing and probe is None:
                    probe = task
                    task.add_done_callback(lambda task: self._woken.notify())
                    self._woken.notify()

        def stops() -> bool:
            return self._is_over() or (probe is not None if probing else False) or circuit.is_closed == probing

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            await self._woken.until(stops)
            await consumer.stop()
        self.taking = False
        self._woken.notify()
        if probe is not None:
            # The task of a probe that ignores its cancellation keeps running, but the circuit gets the result earlier.
            await self._woken.until(
                lambda: self._is_over() or probe.done() or circuit.probes != probes or circuit.is_closed
            )
