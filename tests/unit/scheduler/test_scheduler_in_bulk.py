"""Ten thousand tasks in one schedule(): nothing is made per task that lives as long as it, and time is linear."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import load_config
from trinity_mq.dispatch.dispatcher import WINDOW
from trinity_mq.messages import Deliver, TaskResult, TaskSlice, decode
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.scheduling import Scheduler
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Task


class Bulk:
    """A scheduler, and a runner that answers with outcomes alone, one after the other."""

    def __init__(self) -> None:
        self.config = load_config({"name": "bulk", "model": {"tiny": {}}})
        self.topology, self.broker = Topology("bulk"), MemoryBroker()
        self.bus, self.other = (MemoryBus(self.broker, self.topology, config=self.config.broker) for _ in range(2))
        self.scheduler = Scheduler(self.config, bus=self.bus)
        self.most_tasks = 0
        """Most asyncio tasks that lived at once."""
        self.queues: set[str] = set()
        self.declared = 0

    def play(self, count: int, deliver: Deliver = "caller") -> tuple[int, float]:
        """Have ``count`` tasks done; return how many statuses came and how long it took."""

        async def main() -> tuple[int, float]:
            await self.bus.connect()
            await self.other.connect()
            await self.scheduler.start()
            declare = self.bus.declare

            async def counts(*queues: Any) -> None:
                self.declared += len(queues)
                await declare(*queues)

            self.bus.declare = counts  # type: ignore[method-assign]
            started = asyncio.get_running_loop().time()
            self.scheduler.schedule([Task(raw_task={"n": n}) for n in range(count)], 1, deliver=deliver)
            answering = asyncio.ensure_future(self.answer(count))
            statuses, _ = await self.scheduler.get_results(1)
            await answering
            seconds = asyncio.get_running_loop().time() - started
            assert not self.scheduler.has_step(1)
            await self.scheduler.stop()
            return len(statuses), seconds

        return run_virtually(main(), limit=1e5)

    async def answer(self, count: int) -> None:
        async with await self.other.consume(self.topology.tasks_train, prefetch=64) as feed:
            for _ in range(count):
                delivery = await anext(feed)
                task_slice = decode(delivery.body, TaskSlice)
                result = TaskResult(
                    batch=1, ticket=task_slice.ticket, task_id=task_slice.task_id, attempt=f"a{task_slice.task_id}",
                    outcome="finished", runs=[0], metrics=[{"reward": 1.0}],
                )  # fmt: skip
                await self.other.publish(self.topology.exchange("results"), batch_key(1), envelope(result))
                await delivery.ack()
                self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
                self.queues |= self.broker.queues.keys()


def lines_executed(work: Callable[[], object]) -> Counter[str]:
    """Return how many lines of the packages dispatch and scheduler ``work`` executed, by module."""
    found: Counter[str] = Counter()

    def line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            found[frame.f_code.co_filename.rsplit("/", 1)[1]] += 1
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if re.search("/trinity_mq/(dispatch|scheduler)/", frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def test_ten_thousand_tasks_make_no_queue_and_no_asyncio_task_each() -> None:
    bulk = Bulk()
    statuses, _ = bulk.play(10_000)
    assert statuses == 10_000
    assert sum(".batch." in name for name in bulk.queues) == 2, "its own, and a spare one for the next ticket"
    assert bulk.declared == 2
    assert not any(".batch." in name for name in bulk.broker.queues), "both are deleted at the stop"
    assert bulk.most_tasks < WINDOW + 30


@pytest.mark.parametrize("deliver", ["caller", "none"])
def test_ten_times_the_tasks_are_ten_times_the_work(deliver: Deliver) -> None:
    few = lines_executed(lambda: Bulk().play(200, deliver))
    many = lines_executed(lambda: Bulk().play(2000, deliver))
    assert sum(few.values()) > 200 * 20, "it looks at the right files"
    for module, lines in many.items():
        assert lines < 13 * max(few[module], 200), f"{module}: {few[module]} lines for 200 tasks, {lines} for 2000"
