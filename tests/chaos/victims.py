"""Agents as processes of their own that kill themselves at a point named in their environment.

``python -m tests.chaos.victims ROLE ID CONFIG_FILE`` with ``CHAOS_POINT="confirmed task_result:3"``: the process ends
by SIGKILL when the third confirm of a task result has arrived; with ``CHAOS_SIGNAL=19`` it freezes there instead.
Points are what passes over the bus (``received``, ``publishing``, ``confirmed``, ``acked`` and a kind of message) and
``workflow``; nothing of an agent's inside is named.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trinity_agents.explorer.agent import Explorer
from trinity_agents.operator.agent import Operator
from trinity_agents.runner.agent import Runner
from trinity_mq.bus import Bus, Consumer, Delivery, Envelope, Queue, Topology
from trinity_mq.config import Config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import TaskBody
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.testing.fakes import FakeEngine
from trinity_mq.workflows import Workflow

POINT_VARIABLE = "CHAOS_POINT"
SEED_VARIABLE = "CHAOS_SEED"
SIGNAL_VARIABLE = "CHAOS_SIGNAL"
NOTES_VARIABLE = "CHAOS_NOTES"
"""A folder: who kills itself leaves a note there just before, for the test to follow."""
RUN_SECONDS = 0.15
"""A run takes up to twice that: at any time some are under way."""


class Point:
    """Where this process dies, if anywhere."""

    name: str
    _left: int

    def __init__(self, said: str | None) -> None:
        self.set(said)

    def set(self, said: str | None) -> None:
        """Have the process die there instead."""
        self.name, _, number = (said or "").rpartition(":")
        self._left = int(number) if self.name else 0

    def passed(self, name: str) -> None:
        """End or freeze the process if this is the time."""
        if name != self.name:
            return
        self._left -= 1
        if self._left == 0:
            folder = os.environ.get(NOTES_VARIABLE)
            if folder:
                (Path(folder) / str(os.getpid())).write_text(name)
            os.kill(os.getpid(), int(os.environ.get(SIGNAL_VARIABLE, signal.SIGKILL)))


POINT = Point(os.environ.get(POINT_VARIABLE))


class Quick(Workflow):
    """A run that asks no model and takes a moment."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return one experience."""
        POINT.passed("workflow")
        await asyncio.sleep(RUN_SECONDS * random.uniform(0.0, 2.0))
        tokens = torch.tensor([3, 4, 5, 1], dtype=torch.int32)
        return [
            Experience(
                eid=EID(),
                tokens=tokens,
                prompt_length=2,
                logprobs=torch.zeros(2),
                reward=random.random(),
                temperature=1.0,
            )
        ]


class Numbers:
    """A taskset without end, each task known by its number."""

    def __init__(self, repeat_times: int) -> None:
        self._repeat_times, self._given = repeat_times, 0

    def __len__(self) -> int:
        return 1_000_000

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next tasks."""
        self._given += size
        return [
            TaskBody(workflow=f"{__spec__.name}.Quick", repeat_times=self._repeat_times, raw_task={"n": n})
            for n in range(self._given - size, self._given)
        ]

    def state(self) -> dict[str, object]:
        """Return the position."""
        return {"given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self._given = state["given"]


def pointed(bus: Bus) -> Bus:
    """Let what passes over a bus pass points."""
    publish, consume = bus.publish, bus.consume

    async def publish_pointed(exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        if POINT.name == f"publishing {_single(envelope.kind)}":
            # on its way, and with luck in the broker, but no confirm has been seen
            out = asyncio.ensure_future(publish(exchange, routing_key, envelope, **how))
            await asyncio.sleep(random.choice([0.0, 0.0005, 0.002]))
            POINT.passed(POINT.name)
            return await out
        routed = await publish(exchange, routing_key, envelope, **how)
        POINT.passed(f"confirmed {_single(envelope.kind)}")
        return routed

    async def consume_pointed(queue: Queue, **how: Any) -> Consumer:
        return PointedFeed(await consume(queue, **how))

    bus.publish, bus.consume = publish_pointed, consume_pointed  # type: ignore[method-assign]
    return bus


def _single(kind: str | None) -> str | None:
    """Results and slices pass the same points alone and together."""
    return {"task_results": "task_result", "task_slices": "task_slice"}.get(kind, kind) if kind else None


class PointedFeed(Consumer):
    """Passes a point at each delivery and after each acknowledgement."""

    def __init__(self, feed: Consumer) -> None:
        self._feed = feed

    async def __anext__(self) -> Delivery:
        return self.passed(await self._feed.__anext__())

    def get_nowait(self) -> Delivery | None:
        """Return what has arrived."""
        found = self._feed.get_nowait()
        return None if found is None else self.passed(found)

    async def stop(self) -> None:
        """Take no more."""
        await self._feed.stop()

    async def close(self) -> None:
        """Stop."""
        await self._feed.close()

    def passed(self, delivery: Delivery) -> Delivery:
        """Pass the points of a delivery."""
        POINT.passed(f"received {_single(delivery.kind)}")
        ack = delivery.ack

        async def acked() -> None:
            await ack()
            POINT.passed(f"acked {_single(delivery.kind)}")

        if POINT.name == f"acked {_single(delivery.kind)}":
            delivery.ack = acked  # type: ignore[method-assign]
        return delivery


def build(role: str, agent_id: str, config: Config) -> Callable[[Bus, Topology], Agent]:
    """Return what makes the agent; an explorer has an engine in name only, and tasks that are numbers."""

    def made(bus: Bus, topology: Topology) -> Agent:
        if POINT.name:
            bus = pointed(bus)
        names: dict[str, Any] = {"bus": bus, "topology": topology, "agent_id": agent_id}
        if role == "runner":
            return Runner(config, **names)
        if role == "operator":
            return Operator(config, **names)
        taskset = Numbers(config.algorithm.repeat_times)
        return Explorer(config, **names, engine=FakeEngine(f"{agent_id}-engine"), taskset=taskset)

    return made


if __name__ == "__main__":
    role, agent_id, path = sys.argv[1:]
    random.seed(os.environ.get(SEED_VARIABLE))
    torch.set_num_threads(1)
    config = Config.model_validate_json(Path(path).read_text())
    sys.exit(run_daemon(config, agent_id, role, build(role, agent_id, config)))  # type: ignore[arg-type]
