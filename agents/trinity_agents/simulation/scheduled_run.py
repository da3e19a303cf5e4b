"""One whole run under a fault schedule. Every agent is real and is restarted after each death."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from structlog.testing import capture_logs

from trinity_agents.explorer.engine_hosting import EngineHosting
from trinity_agents.operator.agent import Operator
from trinity_agents.runner.agent import Runner
from trinity_agents.simulation.coverage import Observer
from trinity_agents.simulation.faulty_bus import Faults, FaultyBus
from trinity_agents.simulation.harness import NumberedTasks, Simulation
from trinity_agents.simulation.schedule import (
    BrokenTransfer,
    BrokerAlarm,
    BrokerRestart,
    ConnectionLoss,
    DeadlyBatch,
    Drain,
    EngineDeath,
    FaultSchedule,
    Freeze,
    Role,
    SandboxOutage,
    StaleWeightsFault,
)
from trinity_agents.simulation.stand_ins import FakeWorkflowRunner, SimulatedChannel, SimulatedEngine, SimulatedLearner
from trinity_mq.bus import BusUnavailable
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import CrashLog
from trinity_mq.runtime.errors import RestartRequested, first_leaf
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

IN_MEMORY = Path("/dev/shm")
"""An in-memory file system, if available, so that saving is fast."""
LIMIT = 1200.0
"""Virtual seconds after which a run counts as hung: longer than any timeout that ends a wait."""
RESTART_SECONDS = (0.05, 0.5, 3.0)
"""Possible delays in seconds until an agent that died is restarted."""
END_PATIENCE = 30.0
"""Seconds after the end of the explorer during which timed faults continue and dead agents are restarted."""
COSTLY = (
    ConnectionLoss
    | BrokerRestart
    | BrokerAlarm
    | Drain
    | EngineDeath
    | StaleWeightsFault
    | BrokenTransfer
    | SandboxOutage
    | Freeze
)
"""Faults that may make a batch stale or cost an engine its weights."""
T = TypeVar("T")


class RunHung(Exception):
    """The run was not over in time. The message lists each running agent with the reason why it waits, and the shared
    queues that hold messages.
    """


class AgentFailed(Exception):
    """An agent ended with an error that is not a request for a restart."""


@dataclass
class ScheduledRun(Simulation):
    """A whole run under a fault schedule. Tests subclass it to break rules on purpose."""

    schedule: FaultSchedule = field(kw_only=True)
    observer: Observer = field(default_factory=Observer)
    lives: list[FaultyBus] = field(default_factory=list)
    living: dict[str, Agent] = field(default_factory=dict)
    """Running agents by id."""
    drained: set[str] = field(default_factory=set)
    """Ids of agents that were drained and will be restarted."""
    ends: list[str] = field(default_factory=list)
    """Errors that ended the lives of agents."""
    left_running: list[str] = field(default_factory=list)
    """Asyncio tasks that still run after all agents have ended."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is over. From then on, dead agents are not restarted."""
    seconds: float = 0.0
    """Duration of the run in virtual seconds."""

    def __post_init__(self) -> None:
        settings, seed = self.schedule.settings, self.schedule.seed
        self.faults = Faults(self.schedule)
        self.batches, self.operators, self.step_seconds = settings.batches, settings.operators, settings.step_seconds
        if not settings.evaluates:
            self.eval_sets = {}
        if self.taskset is not None:
            self.taskset = partial(NumberedTasks, settings.repeat)
        self.channel = SimulatedChannel(
            [fault.n for fault in self.schedule.faults if isinstance(fault, BrokenTransfer)]
        )
        failed_receives = defaultdict(list)
        for fault in self.schedule.faults:
            if isinstance(fault, StaleWeightsFault):
                failed_receives[fault.engine].append(fault.n)
        names = [f"engine-{number}" for number in range(settings.engines)]
        self.engines = {name: SimulatedEngine(name, settings, failed_receives[n]) for n, name in enumerate(names)}
        self.deadly = [fault.batch for fault in self.schedule.faults if isinstance(fault, DeadlyBatch)]
        self.outages = [
            (fault.at, fault.at + fault.seconds) for fault in self.schedule.faults if isinstance(fault, SandboxOutage)
        ]
        self.workflows = FakeWorkflowRunner(seed, settings, self.engines, self._is_sandbox_down, self.faults.dice)
        self.pool = FakeWorkflowRunner(
            seed, settings, self.engines, self._is_sandbox_down, self.faults.dice, is_pool=True
        )
        super().__post_init__()

    def settings(self) -> dict[str, Any]:
        """Return the schedule's configuration."""
        return super().settings() | self.schedule.settings.sections()

    def _is_sandbox_down(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(begin <= now < end for begin, end in self.outages)

    def life(self, role: Role, name: str) -> FaultyBus:
        """Return the connection for a new life of an agent."""

        def on_end(event: str) -> None:
            agent = self.living[name]
            self.observer.note(role, "frozen" if event == "thawed" else agent.state, event)

        number = sum(bus.who.partition("'")[0] == name for bus in self.lives)
        who = name + "'" * number
        bus = FaultyBus(self.broker, self.topology, self.config.broker, self.faults, role, who, on_end)
        self.lives.append(bus)
        return bus

    # -- making and restarting agents

    def new_runner(self, name: str) -> Agent:
        """Return a new runner."""
        bus = self.life("runner", name)
        stand_ins: dict[str, Any] = {"workflows": self.workflows, "isolated": self.pool}
        notes = CrashLog(self.folder / f"{name}.at-work.json")
        return Runner(self.config, bus=bus, topology=self.topology, agent_id=name, crash_notes=notes, **stand_ins)

    def new_operator(self, name: str) -> Agent:
        """Return a new operator."""
        bus = self.life("operator", name)
        notes = CrashLog(self.folder / f"{name}.at-work.json")
        return Operator(self.config, bus=bus, topology=self.topology, agent_id=name, crash_notes=notes)

    def new_explorer(self, name: str) -> Agent:
        """Return a new explorer on the run's folder, with the engines that its predecessor left."""
        return self.explorer_on(self.life("explorer", name), name, list(self.engines.values())[:2])

    def new_trainer(self, name: str) -> Agent:
        """Return a new trainer on the run's folder."""
        bus = self.life("trainer", name)
        return self.trainer_on(bus, name, SimulatedLearner(self.step_seconds, bus.point, self.deadly, bus.kill))

    def new_host(self, name: str) -> Agent:
        """Return a new host for the engines that do not belong to the explorer."""
        bus = self.life("engine", name)
        engines = list(self.engines.values())[2:]
        return EngineHosting(self.config, bus=bus, topology=self.topology, agent_id=name, engines=engines)

    async def keep(self, name: str, make: Callable[[str], Agent]) -> None:
        """Run an agent; restart it after a kill, a drain or a recoverable error, until it ends by itself or the run is
        over.

        Raises:
            AgentFailed: The agent ended with another error.
        """
        while True:
            agent = make(name)
            agent.run_folder = self.folder
            bus = self.lives[-1]
            self.living[name] = agent
            life = bus.begin(agent.run)
            await asyncio.wait([life, bus.killed], return_when=asyncio.FIRST_COMPLETED)
            del self.living[name]
            if bus.dead:
                await bus.close()
            elif (error := life.exception()) is None:
                self.faults.note(bus.who, "ended")
                if name not in self.drained:
                    return
                self.drained.remove(name)
            else:
                cause = first_leaf(error)
                self.observer.note(bus.role, agent.state, "failed")
                self.faults.note(bus.who, f"ended with {type(cause).__name__}: {cause}")
                self.ends.append(f"{bus.who}: {type(cause).__name__}: {cause}")
                if not isinstance(cause, RestartRequested | BusUnavailable):
                    raise AgentFailed(f"{bus.who} ended with {type(cause).__name__}: {cause}") from error
            if self.over.is_set():
                return
            await asyncio.sleep(self.faults.dice.choice(RESTART_SECONDS))

    # -- timed faults

    async def _inject_timed_faults(self) -> None:
        """Inject the faults that happen at a time, not at a fault point."""
        async with asyncio.TaskGroup() as group:
            for fault in self.schedule.faults:
                if isinstance(fault, Drain | ConnectionLoss | BrokerRestart | BrokerAlarm | EngineDeath):
                    group.create_task(self._inject(fault))

    async def _inject(self, fault: Drain | ConnectionLoss | BrokerRestart | BrokerAlarm | EngineDeath) -> None:
        await asyncio.sleep(fault.at)
        self.faults.note("", f"{fault} happens")
        living = [bus for bus in self.lives if bus.lives]
        if isinstance(fault, BrokerRestart):
            for bus in living:
                self.broker.drop(bus, delay=fault.seconds + self.faults.dice.random())
        elif isinstance(fault, BrokerAlarm):
            self.broker.block()
            await asyncio.sleep(fault.seconds)
            self.broker.unblock()
        elif isinstance(fault, EngineDeath):
            engine = list(self.engines.values())[fault.engine]
            engine.die()
            await asyncio.sleep(fault.seconds)
            engine.restart()
        elif candidates := [bus for bus in living if bus.role == fault.role]:
            bus = self.faults.dice.choice(candidates)
            if isinstance(fault, ConnectionLoss):
                self.broker.drop(bus, delay=fault.seconds)
            else:
                name = bus.who.rstrip("'")
                self.drained.add(name)
                self.living[name].drain()

    async def suffer(self) -> None:
        """Play the run to its end.

        Raises:
            AgentFailed: An agent ended with an error.
            RunHung: The run was not over within :data:`LIMIT` virtual seconds.
        """
        await self.record_messages()
        deadline = asyncio.create_task(self._deadline())
        run = asyncio.create_task(self._run())
        await asyncio.wait([deadline, run], return_when=asyncio.FIRST_COMPLETED)
        self.seconds = asyncio.get_running_loop().time()
        waiting = [] if run.done() else self.waiting()
        for task in (deadline, run):
            task.cancel()
        await asyncio.wait([deadline, run])
        if waiting:
            raise RunHung("; ".join(waiting))
        await run
        for engine in self.engines.values():
            await engine.end()
        tasks = asyncio.all_tasks() - self._tasks_of_killed_agents() - {asyncio.current_task()}
        self.left_running = sorted(f"{task.get_name()}: {task.get_coro()}" for task in tasks)

    def _tasks_of_killed_agents(self) -> set[asyncio.Task[Any]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop.tasks_of({bus.who for bus in self.lives if bus.dead})

    async def bury(self) -> None:
        """Cancel the tasks of killed agents after the run was judged, so that they cannot influence the verdict."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for bus in self.lives:
            loop.thaw(bus.who)
        while tasks := self._tasks_of_killed_agents():
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _deadline(self) -> None:
        await asyncio.sleep(LIMIT)

    async def _run(self) -> None:
        settings = self.schedule.settings
        async with asyncio.TaskGroup() as group:
            explorers = [group.create_task(self.keep("explorer-0", self.new_explorer))]
            if settings.standby:
                explorers.append(group.create_task(self.keep("explorer-1", self.new_explorer)))
            others = [group.create_task(self.keep(f"runner-{n}", self.new_runner)) for n in range(2)]
            others += [group.create_task(self.keep(f"operator-{n}", self.new_operator)) for n in range(self.operators)]
            others.append(group.create_task(self.keep("trainer-0", self.new_trainer)))
            if settings.engines > 2:
                others.append(group.create_task(self.keep("host-0", self.new_host)))
            others += self.further(group)
            beside = group.create_task(self._inject_timed_faults())
            await asyncio.wait(explorers)
            await asyncio.wait(others, timeout=END_PATIENCE)
            self.over.set()
            beside.cancel()
            if self.broker.blocked:
                self.broker.unblock()

    def surroundings(self) -> AbstractContextManager[None]:
        """Return a context manager that is active during the run."""
        return nullcontext()

    def further(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start additional parts of the run. Return the tasks that end by themselves."""
        return []

    def waiting(self) -> list[str]:
        """Return a line for each running agent, with its state and the reason why it waits, and a line for each shared
        queue that holds messages.
        """
        agents = [
            f"{name} is {agent.state} and waits for {agent.waits_for or 'nothing that it says'}"
            for name, agent in sorted(self.living.items())
        ]
        depths = {name.removeprefix(self.topology.prefix): queue.depth for name, queue in self.broker.queues.items()}
        shared = (f"{depth} in {name}" for name, depth in sorted(depths.items()) if depth and name in WORK)
        return [*agents, *shared]

    # -- facts for the invariants

    @property
    def is_undisturbed(self) -> bool:
        """True if no agent failed or was restarted, and the schedule has no fault of the kinds in :data:`COSTLY`."""
        return (
            not self.ends
            and len(self.lives) == len({bus.who.rstrip("'") for bus in self.lives})
            and not any(isinstance(fault, COSTLY) for fault in self.schedule.faults)
        )


WORK = ("tasks.train", "tasks.eval", "closed", "submitted", "dead")
"""Queues that agents share."""


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Seed the random numbers and the uuids of the library, so that a seed determines the whole run."""
    dice = random.Random(seed)
    state = random.getstate()
    random.seed(seed)

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=dice.getrandbits(128), version=4)

    with mock.patch.object(uuid, "uuid4", uuid4):
        try:
            yield
        finally:
            random.setstate(state)


def play_to_end(
    schedule: FaultSchedule, judge: Callable[[ScheduledRun, BaseException | None], T], kind: type[ScheduledRun]
) -> T:
    """Play a schedule to its end and return the result of ``judge``.

    Args:
        schedule: The schedule to play.
        judge: Called with the run, whose folder still exists, and the error that ended it, or None.
        kind: Class of the run.
    """
    memory = str(IN_MEMORY) if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=memory) as folder, drawn(schedule.seed), capture_logs():
        run = kind(Path(folder), schedule=schedule)

        async def to_the_end() -> T:
            error: BaseException | None = None
            try:
                await run.suffer()
            except Exception as ended:
                error = first_leaf(ended)
            try:
                return judge(run, error)
            finally:
                await run.bury()

        with run.observer.watching(), run.surroundings():
            return run_virtually(to_the_end())
