"""A broker in memory, connections that take note of what goes over them, and peers to say something on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from trinity_agents.simulation import Simulation, killed, until
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.base import BusError, Consumer, Delivery
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import Heartbeat, Message, TaskBody, TaskResults, TaskSlice, decode_any
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually

CONFIRM = 0.01
"""Seconds a confirm takes."""


class World:
    def __init__(self, *overrides: str) -> None:
        self.config = load_config(
            {"name": "w", "model": {"tiny": {}}, "monitor": {"tensorboard": False}, "buffer": {"batch_size": 2}},
            overrides,
        )
        self.topology = Topology("w")
        self.broker = MemoryBroker()
        self.wire: list[str] = []
        """``sent``, ``confirmed`` or ``returned`` and a kind, ``acked`` and a queue, ``deleted`` and a queue; in the
        order in which it happened."""
        self.times: list[float] = []
        """When, for each entry of :attr:`wire`."""
        self.kill_after: tuple[int, asyncio.Task[Any]] | None = None
        """Entries of :attr:`wire` after which a task is ended at its next step."""
        self.loses_confirm_of = ""
        """The kind of message whose next confirm is lost."""
        self.outside = NotingBus(self, noted=False)
        self.seq = 100

    def note(self, what: str) -> None:
        self.wire.append(what.replace(self.topology.prefix, ""))
        self.times.append(asyncio.get_running_loop().time())
        if self.kill_after is not None and len(self.wire) == self.kill_after[0]:
            self.kill_after[1].cancel()

    def bus(self) -> NotingBus:
        return NotingBus(self)

    @asynccontextmanager
    async def living(self, *agents: Agent) -> AsyncIterator[None]:
        """Run agents; at the end drain them and see them end."""
        await self.ready()
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        try:
            await asyncio.sleep(0.2)
            yield
            for agent in agents:
                agent.drain()
            await asyncio.gather(*tasks)
        finally:
            await kill(*tasks)

    async def ready(self) -> None:
        if not self.outside.usable:
            await self.outside.connect()
            await self.outside.declare(*self.topology.durable)

    async def beat(
        self, role: Any, name: str, seq: int | None = None, /, state: str = "working", **detail: Any
    ) -> None:
        self.seq += 1
        found = Heartbeat(
            role=role,
            id=name,
            seq=self.seq if seq is None else seq,
            incarnation="x",
            lease=detail.pop("lease", 10.0),
            state=state,
            waits_for=detail.pop("waits_for", None),
            detail=detail,
        )
        await self.outside.publish(self.topology.exchange("telemetry"), f"beat.{role}.{name}", envelope(found))
        await asyncio.sleep(0.01)

    async def put(self, queue: str, body: bytes, **how: Any) -> None:
        """Publish straight to a queue, as anybody could."""
        mail = Envelope(body=body, **{"kind": "unknown", "headers": {}, **how})
        assert await self.outside.publish("", self.topology.prefix + queue, mail)

    def count(self, queue: str) -> int | None:
        """Messages ready, None where there is no such queue."""
        found = self.broker.queues.get(self.topology.prefix + queue)
        return None if found is None else found.depth

    def stored(self, queue: str) -> list[Any]:
        """What a queue holds, without taking it."""
        found: Any = self.broker.queues[self.topology.prefix + queue]
        return list(found.messages)

    def stream(self, name: str) -> list[Message]:
        """The control-plane messages of a stream, results that came together one by one."""
        return [
            message
            for each in self.stored(name)
            if not str(each.headers["kind"]).startswith("experience")
            for message in one_by_one(decode_any(each.body))
        ]

    def reasons(self) -> list[str]:
        """Why each body in ``dead`` is there."""
        return [str(each.headers.get("dead-reason")) for each in self.stored("dead")]

    def held_back(self, queue: str, deliveries: int, *, failed: int = 0) -> None:
        """Let what waits in a queue look as if the broker had taken it back so often, after so many failed tries."""
        work: Any = self.broker.queues[self.topology.prefix + queue]
        seen = {"failed-tries": failed, "failures": "delivery 1: seen"} if failed else {}
        for each in work.purge():
            work.put(replace(each, deliveries_before=deliveries, headers={**each.headers, **seen}))

    def emptied(self, queue: str) -> None:
        """Let what waits in a queue be lost."""
        work: Any = self.broker.queues[self.topology.prefix + queue]
        work.purge()


class NotingBus(MemoryBus):
    """Confirms take their time, and everything is noted."""

    def __init__(self, world: World, noted: bool = True) -> None:
        super().__init__(world.broker, world.topology, config=world.config.broker)
        self.world, self.noted = world, noted

    async def publish(self, exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        quiet = not self.noted or envelope.kind in {"beat", "metrics"}
        if not quiet:
            self.world.note(f"sent {envelope.kind}")
        if envelope.kind == self.world.loses_confirm_of:
            self.world.loses_confirm_of = ""
            self.world.broker.lose_confirm_once()
        routed = await super().publish(exchange, routing_key, envelope, **how)
        await asyncio.sleep(CONFIRM)
        if not quiet:
            self.world.note(f"{'confirmed' if routed else 'returned'} {envelope.kind}")
        return routed

    async def delete(self, name: str) -> None:
        self.world.note(f"deleted {name}")
        await super().delete(name)

    async def consume(self, queue: Any, **how: Any) -> Any:
        consumer = await super().consume(queue, **how)
        return AcksNoted(consumer, self.world.note) if self.noted and queue.kind == "quorum" else consumer


@dataclass
class RunOn(Simulation):
    """A whole run whose agents have connections of a test's class."""

    connection: type[MemoryBus] = MemoryBus

    def bus(self) -> MemoryBus:
        return self.connection(self.broker, self.topology, config=self.config.broker)


class AcksNoted(Consumer):
    """A consumer that notes each acknowledgement as ``acked`` or ``void``, with the queue's name."""

    def __init__(self, consumer: Consumer, note: Callable[[str], None]) -> None:
        self.consumer, self.note = consumer, note

    async def __anext__(self) -> Delivery:
        return self.noted(await self.consumer.__anext__())

    def get_nowait(self) -> Delivery | None:
        delivery = self.consumer.get_nowait()
        return None if delivery is None else self.noted(delivery)

    async def stop(self) -> None:
        await self.consumer.stop()

    async def close(self) -> None:
        await self.consumer.close()

    def noted(self, delivery: Delivery) -> Delivery:
        ack = delivery.ack

        async def acked() -> None:
            try:
                await ack()
            except BusError:
                self.note(f"void {delivery.queue}")
                raise
            self.note(f"acked {delivery.queue}")

        delivery.ack = acked  # type: ignore[method-assign]
        return delivery


@asynccontextmanager
async def beside(run: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Do what stands in the block beside a run, and wait for the end of both."""
    async with asyncio.TaskGroup() as group:
        group.create_task(run)
        await asyncio.sleep(0.001)  # from then on what is published is recorded
        yield


class Over(Exception):
    """The scene has been seen."""


def leaf(error: BaseException, kind: type[BaseException]) -> BaseException:
    """Return the first exception of a kind in a group."""
    if isinstance(error, BaseExceptionGroup):
        group = error.subgroup(kind)
        assert group is not None, error
        return leaf(group.exceptions[0], kind)
    return error


def failure(run: Coroutine[Any, Any, Any], kind: type[BaseException], *, limit: float) -> BaseException:
    """Run in virtual time until it fails, and return its first exception of a kind."""
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(run, limit=limit)
    return leaf(caught.value, kind)


async def kill(*tasks: asyncio.Task[Any]) -> None:
    """End agents as SIGKILL would: nothing they do afterwards counts but losing their connection."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def killed_when(
    when: Callable[[], Any],
    *lives: Callable[[], Agent],
    then: float = 0.0,
    pause: float = 0.0,
    between: Callable[[], object] = lambda: None,
    step: float = 0.01,
) -> None:
    """Run an agent that is killed some seconds after a condition holds or a coroutine ends, and after a pause another.
    With one of ``lives`` both are made by it.
    """
    first = asyncio.get_running_loop().create_task(lives[0]().run())
    await (when() if asyncio.iscoroutinefunction(when) else until(when, step))
    await asyncio.sleep(then)
    if await killed(first):
        await asyncio.sleep(pause)
        between()
        await lives[-1]().run()


def experience(task: int = 0, run: int = 0, length: int = 4, **fields: Any) -> Experience:
    return Experience(
        **{
            "eid": EID(batch=1, task=task, run=run),
            "tokens": torch.arange(length, dtype=torch.int32),
            "prompt_length": 2,
            "logprobs": torch.zeros(length - 2),
            "reward": float(run % 2),
            "versions": [(0, 1, 3)],
            "temperature": 1.0,
            **fields,
        }
    )


def a_slice(ticket: str = "t1", task: int = 0, runs: int = 2, **fields: Any) -> TaskSlice:
    limits = {"max_timeout": 100.0, "slice_timeout": 300.0}
    return TaskSlice(
        **{
            "batch": 1,
            "ticket": ticket,
            "task_id": task,
            "repeat_times": runs,
            "task": TaskBody(workflow="none"),
            "explorer": "explorer-0",
            **limits,
            **fields,
        }
    )


def an_outcome(task_slice: TaskSlice, **fields: Any) -> SliceOutcome:
    runs = list(range(task_slice.run_base, task_slice.run_base + task_slice.repeat_times))
    return SliceOutcome(
        **{
            "experiences": [experience(task_slice.task_id, run) for run in runs],
            "runs": runs,
            "metrics": [{"reward": 1.0} for _ in runs],
            "version_min": (1, 3),
            "version_max": (1, 3),
            **fields,
        }
    )


async def send_slice(world: World, task_slice: TaskSlice) -> None:
    """Publish a slice as its explorer would, its batch queue declared."""
    await world.ready()
    if task_slice.deliver != "none":
        await world.outside.declare(world.topology.batch_queue(task_slice.batch, task_slice.ticket))
    mail = envelope(task_slice, message_id=f"{task_slice.ticket}-{task_slice.task_id}-{task_slice.run_base}")
    await world.outside.publish(world.topology.exchange("tasks"), f"{task_slice.lane}.1", mail)


def one_by_one(message: Message) -> Sequence[Message]:
    """Return the results in a message that holds several, else the message."""
    return message.results if isinstance(message, TaskResults) else [message]
