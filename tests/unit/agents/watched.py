"""A simulated run of which every act on the broker, and every save of the explorer's state, is noted in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.agents.world import AcksNoted
from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.operator.agent import Operator
from trinity_agents.simulation import Simulation
from trinity_agents.trainer.agent import Trainer
from trinity_mq.bus import Envelope, Queue
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.testing.fakes import FakeLearner, FakeRunnerAgent

QUIET = {"beat", "metrics", "sync_event"}


@dataclass(frozen=True)
class Act:
    """What one agent did."""

    who: str
    """Agent id; ``explorer-0'`` is the second life of that id, and so on."""
    what: str
    """``saved``, ``declare``, ``declare ahead`` (a batch queue without its binding), ``unbind``,
    ``delete``, ``publish``, ``confirmed``, ``acked``."""
    subject: str = ""
    """Kind of a message, or name of a queue without the run's prefix."""
    ticket: str = ""
    mail: Envelope | None = None
    state: dict[str, Ticket] = field(default_factory=dict)
    """Of ``saved``: the open tickets."""
    time: float = 0.0


class WatchedBus(MemoryBus):
    """Notes in its simulation what passes over it."""

    def __init__(self, sim: WatchedSimulation) -> None:
        super().__init__(sim.broker, sim.topology, config=sim.config.broker)
        self.sim, self.who = sim, ""

    def act(self, what: str, subject: str, **more: Any) -> None:
        self.sim.act(self.who, what, subject.removeprefix(self.sim.topology.prefix), **more)

    async def declare(self, *queues: Queue) -> None:
        await super().declare(*queues)
        for queue in queues:
            ahead = ".batch." in queue.name and not queue.bindings
            self.act("declare ahead" if ahead else "declare", queue.name)

    async def unbind(self, queue: Queue) -> None:
        await super().unbind(queue)
        self.act("unbind", queue.name)

    async def delete(self, name: str) -> None:
        self.act("delete", name)
        await super().delete(name)

    async def publish(self, exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        if envelope.kind in QUIET:
            return await super().publish(exchange, routing_key, envelope, **how)
        about = {"ticket": str(envelope.headers.get("ticket", "")), "mail": envelope}
        self.act("publish", envelope.kind, **about)
        await self.sim.before_publish(self.who, envelope)
        for _ in range(self.sim.times_published):
            routed = await super().publish(exchange, routing_key, envelope, **how)
        await asyncio.sleep(0.001)  # a confirm takes its time
        self.act("confirmed", envelope.kind, **about)
        return routed

    async def consume(self, queue: Queue, **how: Any) -> Any:
        consumer = await super().consume(queue, **how)
        return AcksNoted(consumer, lambda note: self.act(*note.split(" ", 1))) if queue.kind == "quorum" else consumer


class WatchedSimulation(Simulation):
    """A whole run whose acts can be looked at afterwards."""

    times_published = 1
    """2: every publish is done twice, as after a lost confirm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.acts: list[Act] = []
        self.holds: Callable[[str, Envelope], float] = lambda who, mail: 0.0
        """Seconds a publish takes before it reaches the broker."""

    def bus(self) -> MemoryBus:
        return WatchedBus(self)

    def act(self, who: str, what: str, subject: str = "", **more: Any) -> None:
        self.acts.append(Act(who, what, subject, time=asyncio.get_running_loop().time(), **more))

    async def before_publish(self, who: str, mail: Envelope) -> None:
        if seconds := self.holds(who, mail):
            await asyncio.sleep(seconds)

    def named(self, agent: Any, lives: Sequence[Any]) -> None:
        agent.bus.who = agent.id + "'" * sum(other.id == agent.id and other is not agent for other in lives)

    def make_explorer(self, agent_id: str = "explorer-0") -> Explorer:
        explorer = super().make_explorer(agent_id)
        self.named(explorer, self.explorers)
        return explorer

    def make_trainer(self, agent_id: str = "trainer-0", learner: FakeLearner | None = None) -> Trainer:
        trainer = super().make_trainer(agent_id, learner)
        self.named(trainer, self.trainers)
        return trainer

    def make_runner(self) -> FakeRunnerAgent:
        runner = super().make_runner()
        self.named(runner, ())
        return runner

    def make_operator(self, number: int = 0) -> Operator:
        operator = super().make_operator(number)
        self.named(operator, ())
        return operator

    def watch_saves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note from now on when the explorer's state is on disk, and what was in it."""
        save = StateFile.save

        async def noted(file: StateFile, state: ExplorerState) -> None:
            copy = state.model_copy(deep=True)
            await save(file, state)
            self.act("explorer-0", "saved", ",".join(copy.accepted), state=copy.tickets)

        monkeypatch.setattr(StateFile, "save", noted)

    def where(self, what: str, subject: str = "", ticket: str = "", who: str = "") -> list[int]:
        """The places in :attr:`acts` of what is like this."""
        return [
            place
            for place, act in enumerate(self.acts)
            if act.what == what
            and subject in {"", act.subject}
            and ticket in {"", act.ticket}
            and act.who.startswith(who)
        ]

    def saves(self, ticket: str, like: Callable[[Ticket], bool]) -> list[int]:
        """The places of the saves in which a ticket was like this."""
        states = {place: self.acts[place].state.get(ticket) for place in self.where("saved")}
        return [place for place, state in states.items() if state is not None and like(state)]

    def tickets(self, kind: str = "task_slice", who: str = "") -> list[str]:
        """The tickets of which a kind of message was published, in their order."""
        return list(dict.fromkeys(self.acts[place].ticket for place in self.where("publish", kind, who=who)))


def late_operators(seconds: Callable[[int], float]) -> Callable[[str, Envelope], float]:
    """Return :attr:`WatchedSimulation.holds` by which operators publish each batch late, by seconds by its number."""

    def held(_who: str, mail: Envelope) -> float:
        return seconds(int(mail.headers["batch"])) if mail.kind == "experience_chunk" and not mail.headers["n"] else 0.0

    return held
