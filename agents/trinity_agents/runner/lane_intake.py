"""Takes the slices of one lane from their queue: as many as there is room for, none, or one, as the circuit says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_agents.runner.circuit import Circuit
from trinity_mq.bus import Bus, Consumer, Delivery, Queue
from trinity_mq.runtime.notify import Notifier


class LaneIntake:
    """Consumes one lane.

    Args:
        bus: Connected.
        queue: The lane's queue.
        slots: Slices at a time. prefetch is that number: of what is delivered only short slices that came together may
            wait.
        circuit: Says when to pause.
        start: Starts the work on a delivery; the task ends when the delivery is answered, or other tasks that answer it
            are tracked.
        woken: Notified when the circuit changes or the runner ends.
        is_over: Whether to take no more.
    """

    def __init__(
        self,
        bus: Bus,
        queue: Queue,
        slots: int,
        circuit: Circuit,
        *,
        start: Callable[[Delivery], asyncio.Task[None]],
        woken: Notifier,
        is_over: Callable[[], bool],
    ) -> None:
        self._bus, self._queue, self._slots, self.circuit = bus, queue, slots, circuit
        self._start, self._woken, self._is_over = start, woken, is_over
        self._work: set[asyncio.Task[None]] = set()
        """Tasks that have a delivery of the lane to answer."""
        self._stopped: list[Consumer] = []
        """Consumers that take no more, of which deliveries may be unanswered."""
        self.taking = False
        """A delivery that is given back may come straight to this runner again."""

    async def run(self) -> None:
        """Take slices until the runner's work is over."""
        clock = asyncio.get_running_loop().time
        while not self._is_over():
            if not self._work:
                await self.close()
            if self.circuit.admits(clock()):
                await self._take()
            else:
                await self._woken.wait(self.circuit.seconds_left(clock()))

    def track(self, task: asyncio.Task[None]) -> None:
        """Leave consumers open while ``task`` is under way: it has a delivery of the lane to answer."""
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def forget(self, task: asyncio.Task[None]) -> None:
        """Wait for a task no longer: another one answers its delivery."""
        self._work.discard(task)

    async def close(self) -> None:
        """Close the consumers that take no more; what is unanswered goes back to the queue."""
        while self._stopped:
            await self._stopped.pop().close()

    async def _take(self) -> None:
        """Take all while the circuit is closed, else one slice, and see how that ends."""
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
            # the work on a probe that ignores its cancellation goes on in its task: the circuit knows its end earlier
            await self._woken.until(
                lambda: self._is_over() or probe.done() or circuit.probes != probes or circuit.is_closed
            )
