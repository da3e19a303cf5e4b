"""A whole run on MemoryBus in virtual time, with a fake learner, engine and runners, and a look at what passed through
the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.unit.agents.world import one_by_one
from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.operator.agent import Operator
from trinity_agents.trainer.agent import Trainer
from trinity_mq.bus import Binding, Bus, Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.memory.queues import StreamQueue, WorkQueue
from trinity_mq.config import Config, load_config
from trinity_mq.messages import Message, TaskBody, TaskSlice, TaskSubmission, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.fakes import FakeChannel, FakeEngine, FakeLearner, FakeRunner, FakeRunnerAgent

M = TypeVar("M", bound=Message)


class Tasks:
    """A taskset without end, each task known by its number."""

    def __init__(self, repeat_times: int = 2) -> None:
        self.repeat_times, self.given = repeat_times, 0

    def __len__(self) -> int:
        return 1000

    def next_batch(self, size: int) -> list[TaskBody]:
        self.given += size
        numbers = range(self.given - size, self.given)
        return [TaskBody(workflow="none", repeat_times=self.repeat_times, raw_task={"n": n}) for n in numbers]

    def state(self) -> dict[str, object]:
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


@dataclass
class Simulation:
    """One run's parts; every agent has a connection of its own to one broker."""

    folder: Path
    overrides: tuple[str, ...] = ()
    batches: int = 6
    step_seconds: float = 1.0
    runner_seconds: Callable[[TaskSlice], float] = lambda task_slice: 0.1
    spoil: Callable[[TaskSlice], str | None] = lambda task_slice: None
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    engine: FakeEngine = field(default_factory=FakeEngine)
    channel: Any = field(default_factory=FakeChannel)
    reports: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    operators: int = 1
    eval_sets: dict[str, list[TaskBody]] = field(
        default_factory=lambda: {"held": [TaskBody(workflow="none", is_eval=True)]}
    )
    taskset: bool = True
    explorers: list[Explorer] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    learners: list[FakeLearner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config: Config = load_config(
            {
                "name": "sim",
                "model": {"tiny": {}},
                "algorithm": {"repeat_times": 2},
                "buffer": {"batch_size": 2, "total_steps": self.batches},
                "explorer": {"eval_interval": 2},
                "monitor": {"tensorboard": False},
            },
            self.overrides,
        )
        self.topology = Topology("sim")

    def bus(self) -> MemoryBus:
        return MemoryBus(self.broker, self.topology, config=self.config.broker)

    def write(self, step: int, values: dict[str, float]) -> None:
        self.reports.append((step, values))

    def make_trainer(self, agent_id: str = "trainer-0", learner: FakeLearner | None = None) -> Trainer:
        learner = learner or FakeLearner(self.step_seconds)
        self.learners.append(learner)
        trainer = Trainer(
            self.config,
            bus=self.bus(),
            topology=self.topology,
            agent_id=agent_id,
            learner=learner,
            channel=self.channel,
            folder=self.folder,
            metrics=self,  # type: ignore[arg-type]
        )
        self.trainers.append(trainer)
        return trainer

    def make_explorer(self, agent_id: str = "explorer-0") -> Explorer:
        explorer = Explorer(
            self.config,
            bus=self.bus(),
            topology=self.topology,
            agent_id=agent_id,
            engine=self.engine,
            folder=self.folder,
            taskset=Tasks() if self.taskset else None,
            eval_sets=self.eval_sets,
            metrics=self,  # type: ignore[arg-type]
        )
        self.explorers.append(explorer)
        return explorer

    async def runner(self, bus: Any, topology: Topology) -> None:
        work = FakeRunner(bus, topology, lambda: self.engine.snapshot.version, self.runner_seconds, self.spoil)
        await work.run()

    def make_runner(self) -> FakeRunnerAgent:
        return FakeRunnerAgent(
            self.config, bus=self.bus(), topology=self.topology, agent_id="runner-0", work=self.runner
        )

    def make_operator(self, number: int = 0) -> Operator:
        return Operator(self.config, bus=self.bus(), topology=self.topology, agent_id=f"operator-{number}")

    async def run(
        self,
        *,
        trainer: Callable[[], Any] | None = None,
        runners: Callable[[], Any] | None = None,
        explorer: Callable[[], Any] | None = None,
        beside: Callable[[], Any] | None = None,
    ) -> None:
        await self.tap()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.make_explorer().run() if explorer is None else explorer())
            group.create_task(self.make_runner().run() if runners is None else runners())
            for number in range(self.operators):
                group.create_task(self.make_operator(number).run())
            group.create_task(self.make_trainer().run() if trainer is None else trainer())
            if beside is not None:
                group.create_task(beside())

    @property
    def trainer(self) -> Trainer:
        return self.trainers[-1]

    @property
    def explorer(self) -> Explorer:
        return self.explorers[-1]

    def values(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.reports if name in values]

    def labels(self) -> list[int]:
        """The evaluations reported, in order."""
        return [step for step, _ in self.values("eval/held/finished_task_count")]

    def state(self) -> ExplorerState:
        """The explorer's state as saved."""
        return StateFile(self.folder / "state" / "explorer.msgpack").load()

    # -- what passes through the broker

    async def client(self) -> Bus:
        """A connection of the test's own."""
        bus = self.bus()
        await bus.connect()
        return bus

    async def tap(self) -> None:
        """Keep a copy of all that is published, bodies of experiences aside."""
        names = ("tasks", "batches", "results", "ready", "sync", "dead")
        bindings = tuple(Binding(self.topology.exchange(name), "#") for name in names)
        bus = await self.client()
        await bus.declare(*self.topology.durable, Queue(name=self.topology.prefix + "tap", bindings=bindings))

    def published(self, kind: type[M]) -> list[M]:
        """Every message of a kind that was published, in order; results that went together one by one."""
        queue = self.broker.queues[self.topology.prefix + "tap"]
        assert isinstance(queue, WorkQueue)
        plain = [stored for stored in queue._ready if stored.content_type != EXPERIENCES]
        messages = [decode_any(stored.body, stored.content_type) for stored in plain if _is_ours(stored.headers)]
        return [single for message in messages for single in one_by_one(message) if isinstance(single, kind)]

    def letters(self) -> list[Mapping[str, object]]:
        """The headers of all dead letters."""
        queue = self.broker.queues[self.topology.dead.name]
        assert isinstance(queue, WorkQueue)
        return [stored.headers for stored in queue._ready]

    def stream(self) -> StreamQueue:
        """The ready stream."""
        queue = self.broker.queues[self.topology.ready.name]
        assert isinstance(queue, StreamQueue)
        return queue

    async def submit(self, number: int, reply_to: str | None = None, **task: Any) -> None:
        """Submit a task from outside under id ``s<number>``."""
        bus = await self.client()
        body = TaskSubmission(task=TaskBody(workflow="none", raw_task={"s": number}, **task))
        mail = envelope(body, message_id=f"s{number}", correlation_id=f"c{number}", reply_to=reply_to)
        await bus.publish(self.topology.exchange("tasks"), "submit", mail)
        await bus.close()

    async def replies(self, name: str = "tmq.sim.replies") -> list[Message]:
        """What was answered so far, taken from the queue."""
        queue = self.broker.queues[name]
        assert isinstance(queue, WorkQueue)
        return [decode_any(stored.body, stored.content_type) for stored in queue._ready]


def _is_ours(headers: Mapping[str, object]) -> bool:
    return headers.get("kind") not in {"experience_chunk", "experience_part", "unknown"}


async def killed(task: asyncio.Task[Any]) -> bool:
    """End a task wherever it is; False when it had ended by itself."""
    over = task.done()
    task.cancel()
    await asyncio.wait([task])
    return not over


def killed_once(sim: Simulation, after: float) -> Callable[[], Awaitable[None]]:
    """Make a trainer that is ended after so many seconds and followed by another, unless its work was over."""

    async def run() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await asyncio.sleep(after)
        first.cancel()
        await asyncio.wait([first])
        if not first.cancelled() and first.exception() is None:
            return
        await asyncio.sleep(2.0)
        await sim.make_trainer().run()

    return run


async def until(condition: Callable[[], bool], step: float = 0.01) -> None:
    """Look every ``step`` virtual seconds, for 300 at most."""
    async with asyncio.timeout(300.0):
        while not condition():  # noqa: ASYNC110  # nobody tells a test, and in virtual time looking costs nothing
            await asyncio.sleep(step)
