"""A whole run in one process on MemoryBus: the real explorer, operators and trainer with a fake learner, engine and
runner. In virtual time (:func:`trinity_mq.testing.virtual_time.run_virtually`) a run takes well under a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.operator.agent import Operator
from trinity_agents.trainer.agent import Trainer
from trinity_mq.bus import Binding, Bus, Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.memory.queues import Stored, StreamQueue, WorkQueue
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.config import Config, load_config
from trinity_mq.messages import Message, TaskBody, TaskResults, TaskSlice, TaskSubmission, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.fakes import FakeChannel, FakeEngine, FakeLearner, FakeRunner, FakeRunnerAgent

M = TypeVar("M", bound=Message)
RECORDED = "recorded"
"""Name of the queue, without the run's prefix, that keeps a copy of each message of the recorded exchanges."""


NOT_MESSAGES = {"experience_chunk", "experience_part", "unknown"}
"""Kinds on the broker whose bodies are not control messages."""


class NumberedTasks:
    """An endless taskset. The raw task holds the number of the task."""

    def __init__(self, repeat_times: int = 2) -> None:
        self.repeat_times, self.given = repeat_times, 0

    def __len__(self) -> int:
        return 1000

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next ``size`` tasks."""
        self.given += size
        numbers = range(self.given - size, self.given)
        return [TaskBody(workflow="none", repeat_times=self.repeat_times, raw_task={"n": n}) for n in numbers]

    def state(self) -> dict[str, object]:
        """Return the number of tasks handed out."""
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume after the tasks of ``state``."""
        self.given = state["given"]


@dataclass
class Simulation:
    """A simulated run: its configuration, its broker and stand-ins, and methods that make its agents.

    Each agent has its own connection to the broker. To restart an agent, make a new agent.
    """

    folder: Path
    """The run folder."""
    overrides: tuple[str, ...] = ()
    """``section.key=value`` settings that override a small configuration with two tasks of two runs per batch."""
    batches: int = 6
    step_seconds: float = 1.0
    """Seconds per step of the fake learner."""
    runner_seconds: Callable[[TaskSlice], float] = lambda task_slice: 0.1
    """Returns the seconds that the fake runner takes for a slice."""
    spoil: Callable[[TaskSlice], str | None] = lambda task_slice: None
    """Returns the fate of a slice: None (finished), ``"empty"`` (no experiences) or ``"failed"``."""
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    engine: FakeEngine = field(default_factory=FakeEngine)
    channel: Any = field(default_factory=FakeChannel)
    reports: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, metrics) pairs of all agents, in the order of their writing."""
    operators: int = 1
    """Number of operator processes."""
    eval_sets: dict[str, list[TaskBody]] = field(
        default_factory=lambda: {"held": [TaskBody(workflow="none", is_eval=True)]}
    )
    taskset: Callable[[], Any] | None = NumberedTasks
    """Makes the explorer's taskset. None: the explorer waits for submissions."""
    recorded: tuple[str, ...] = ("tasks", "batches", "results", "ready", "sync", "dead")
    """Exchanges whose messages are all recorded."""
    explorers: list[Explorer] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    learners: list[FakeLearner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config: Config = load_config(self.settings(), self.overrides)
        self.topology = Topology("sim")

    def settings(self) -> dict[str, Any]:
        """Return the base configuration, to which :attr:`overrides` apply."""
        return {
            "name": "sim",
            "model": {"tiny": {}},
            "algorithm": {"repeat_times": 2},
            "buffer": {"batch_size": 2, "total_steps": self.batches},
            "explorer": {"eval_interval": 2},
            "monitor": {"tensorboard": False},
            "outsiders": {"workflows": {"none": []}},
        }

    def bus(self) -> MemoryBus:
        """Return a new connection that is not connected yet."""
        return MemoryBus(self.broker, self.topology, config=self.config.broker)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record metrics. The simulation is the metrics writer of its agents."""
        self.reports.append((step, values))

    def close(self) -> None:
        """Do nothing: metrics stay available after their writers have closed."""

    def make_trainer(self, agent_id: str = "trainer-0", learner: FakeLearner | None = None) -> Trainer:
        """Return a trainer on the run's folder. It resumes from the state of an earlier trainer."""
        learner = learner or FakeLearner(self.step_seconds)
        self.learners.append(learner)
        return self.trainer_on(self.bus(), agent_id, learner)

    def trainer_on(self, bus: MemoryBus, agent_id: str, learner: FakeLearner) -> Trainer:
        """Return a trainer on the run's folder that uses this connection."""
        trainer = Trainer(
            self.config,
            bus=bus,
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
        """Return an explorer on the run's folder. It resumes from the state of an earlier explorer."""
        return self.explorer_on(self.bus(), agent_id, [self.engine])

    def explorer_on(self, bus: MemoryBus, agent_id: str, engines: Sequence[FakeEngine]) -> Explorer:
        """Return an explorer on the run's folder that uses this connection and hosts these engines."""
        explorer = Explorer(
            self.config,
            bus=bus,
            topology=self.topology,
            agent_id=agent_id,
            engines=engines,
            folder=self.folder,
            taskset=None if self.taskset is None else self.taskset(),
            eval_sets=self.eval_sets,
            metrics=self,  # type: ignore[arg-type]
        )
        self.explorers.append(explorer)
        return explorer

    async def runner(self, bus: Any, topology: Topology) -> None:
        """Run slices with a fake runner, on the bus of the agent that calls this method, until cancelled."""
        work = FakeRunner(bus, topology, lambda: self.engine.snapshot.version, self.runner_seconds, self.spoil)
        await work.run()

    def make_runner(self, agent_id: str = "runner-0") -> FakeRunnerAgent:
        """Return an agent that takes slices as a runner does, and runs them with :meth:`runner`."""
        return FakeRunnerAgent(self.config, bus=self.bus(), topology=self.topology, agent_id=agent_id, work=self.runner)

    def make_operator(self, number: int = 0) -> Operator:
        """Return an operator agent with the configured operators."""
        return Operator(
            self.config,
            bus=self.bus(),
            topology=self.topology,
            agent_id=f"operator-{number}",
            metrics=self,  # type: ignore[arg-type]
        )

    async def run(
        self,
        *,
        trainer: Callable[[], Any] | None = None,
        runners: Callable[[], Any] | None = None,
        explorer: Callable[[], Any] | None = None,
        beside: Callable[[], Any] | None = None,
    ) -> None:
        """Run until every agent has ended.

        Args:
            trainer: Awaited instead of the default trainer's ``run()``.
            runners: Awaited instead of the default runner's ``run()``.
            explorer: Awaited instead of the default explorer's ``run()``.
            beside: Awaited concurrently with the agents.

        Raises:
            ExceptionGroup: An agent failed.
        """
        await self.record_messages()
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
        """The last trainer made."""
        return self.trainers[-1]

    @property
    def explorer(self) -> Explorer:
        """The last explorer made."""
        return self.explorers[-1]

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of the metric ``name`` in the order of their writing."""
        return [(step, values[name]) for step, values in self.reports if name in values]

    def evaluated_steps(self) -> list[int]:
        """Return the labels of the evaluations of the set ``held`` that were reported, in order. A label is a number of
        closed batches.
        """
        return [step for step, _ in self.values("eval/held/finished_task_count")]

    def state(self) -> ExplorerState:
        """Return the explorer's saved state."""
        return StateFile.of(self.folder).load()

    async def client(self) -> Bus:
        """Return a connected bus for a client of the run."""
        bus = self.bus()
        await bus.connect()
        return bus

    async def record_messages(self) -> None:
        """Keep a copy of every message that is published to the exchanges in :attr:`recorded` from now on."""
        bindings = tuple(Binding(self.topology.exchange(name), "#") for name in self.recorded)
        bus = await self.client()
        await bus.declare(*self.topology.durable, Queue(name=self.topology.prefix + RECORDED, bindings=bindings))

    def published(self, kind: type[M]) -> list[M]:
        """Return every recorded control message of class ``kind``, in order. A message with several results is split
        into single results.
        """
        return [message for message in self.messages() if isinstance(message, kind)]

    def messages(self) -> list[Message]:
        """Return every recorded control message, in order. A message with several results is split into its results."""
        messages: list[Message] = []
        for stored in self.waiting_in(RECORDED):
            if stored.content_type != EXPERIENCES and stored.headers.get("kind") not in NOT_MESSAGES:
                message = decode_any(stored.body, stored.content_type)
                messages += message.results if isinstance(message, TaskResults) else [message]
        return messages

    def dead_letters(self) -> list[Mapping[str, object]]:
        """Return the headers of all dead letters."""
        return [stored.headers for stored in self.waiting_in("dead")]

    def waiting_in(self, name: str) -> list[Stored]:
        """Return the messages that wait in a queue of the run. ``name`` omits the run's prefix."""
        return self._queue(self.topology.prefix + name)

    def stream(self) -> StreamQueue:
        """Return the ready stream."""
        queue = self.broker.queues[self.topology.ready.name]
        assert isinstance(queue, StreamQueue)
        return queue

    def _queue(self, name: str) -> list[Stored]:
        queue = self.broker.queues[name]
        assert isinstance(queue, WorkQueue)
        return queue.messages

    async def submit(
        self, number: int, reply_to: str | None = None, headers: Mapping[str, HeaderValue] | None = None, **task: Any
    ) -> None:
        """Submit a task from an external client with the id ``s<number>``."""
        bus = await self.client()
        body = TaskSubmission(task=TaskBody(workflow="none", raw_task={"s": number}, **task))
        message = envelope(body, message_id=f"s{number}", correlation_id=f"c{number}", reply_to=reply_to)
        message = replace(message, headers={**message.headers, **(headers or {})})
        await bus.publish(self.topology.exchange("tasks"), "submit", message)
        await bus.close()

    async def replies(self, name: str = "tmq.sim.replies.submit.test") -> list[Message]:
        """Return the messages that wait in the reply queue ``name``."""
        return [decode_any(stored.body, stored.content_type) for stored in self._queue(name)]


async def killed(task: asyncio.Task[Any]) -> bool:
    """Cancel an agent's task. Return False if the task had already ended."""
    ended = task.done()
    task.cancel()
    await asyncio.wait([task])
    return not ended


def kill_and_replace_trainer(sim: Simulation, after: float) -> Callable[[], Awaitable[None]]:
    """Return a ``trainer`` for :meth:`Simulation.run` that is killed after ``after`` seconds, unless it has ended by
    then, and replaced 2 seconds later.
    """

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
    """Poll every ``step`` seconds of virtual time until ``condition`` holds, for at most 300 seconds."""
    async with asyncio.timeout(300.0):
        while not condition():  # noqa: ASYNC110  # nobody tells a test, and in virtual time looking costs nothing
            await asyncio.sleep(step)
