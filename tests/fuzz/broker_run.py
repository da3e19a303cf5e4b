"""A whole run in mode ``serve`` in this process on a real broker, and hostile messages to each of its readers.

Explorer, runner, operator, trainer and gateway are the real ones, each with a connection of its own; engine, learner
and workflows are stand-ins of the simulation. After each round of hostile messages a submitted task and a session of a
user of the gateway must be trained on, over all work queues and streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import aiohttp
import structlog

from tests.fuzz.hostile import TARGETS, Hostile, draw
from tests.raw_amqp import RawPublisher
from trinity_agents.gateway import agent as gateway_agent
from trinity_agents.gateway.agent import Gateway
from trinity_agents.runner.agent import Runner
from trinity_agents.simulation.harness import Simulation
from trinity_agents.simulation.schedule import draw as draw_schedule
from trinity_agents.simulation.sessions.gateways import SimulatedClients
from trinity_agents.simulation.stand_ins import FakeWorkflowRunner, SimulatedEngine
from trinity_mq.bus import Consumer, Delivery, Queue, Topology
from trinity_mq.bus.base import Incoming
from trinity_mq.bus.rabbit import consumer as rabbit_consumer
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.routing import routing_problem
from trinity_mq.cli.dead import paragraph
from trinity_mq.messages import DecodeError, SubmissionOutcome, TaskBody, TaskSubmission, decode, decode_any
from trinity_mq.operations.dead_letters import letters, row
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import acknowledge, envelope

STARTS_WITHIN = 60.0
HANDLED_WITHIN = 30.0
"""Seconds within which the messages of a round are read, and a good one is trained on."""
LOOK_AGAIN = 0.02


class FuzzError(AssertionError):
    """An agent did not survive a message, or good ones are not handled any more."""


@dataclass(eq=False)
class Try:
    """A hostile message, and what became of it."""

    hostile: Hostile
    refused: bool = False
    dead: bool = False
    seen: bool = False
    """An agent has read it."""
    right: bool = False
    """It is a message, with readable properties."""

    @property
    def outcome(self) -> str:
        """Handled: it is a right message. Ignored: it is none, and no dead letter was made of it. Refused: by the
        broker. Expired: the broker dropped it in time. Unread: nobody took it.
        """
        if self.refused:
            return "refused"
        if self.dead and self.hostile.target.name != "dead":
            return "dead letter"
        if self.seen or self.dead:
            return "handled" if self.right or self.hostile.target.name == "dead" else "ignored"
        return "expired" if self.hostile.what in {"expiration", "several"} else "unread"


@dataclass
class Seen:
    """The tries of the present round by where they are read, and what agents have read of them."""

    prefix: str
    tries: dict[tuple[str, bytes], list[Try]] = field(default_factory=dict)

    def expect(self, one: Try) -> None:
        """Note that a message was published."""
        self.tries.setdefault((one.hostile.target.name, digest(one.hostile.body)), []).append(one)

    def of(self, queue: str, body: bytes) -> list[Try]:
        """Return the tries that a message in a queue may be, copies with the same body too."""
        name = queue.removeprefix(self.prefix)
        name = name if name.startswith("tasks.") else name.partition(".")[0]
        return self.tries.get((name, digest(body)), [])

    def note(self, queue: Queue, delivery: Delivery) -> list[Try]:
        """Note that an agent reads a message, and return the tries that it may be."""
        tries = self.of(queue.name, delivery.body)
        for one in tries:
            one.seen, one.right = True, one.right or is_right(delivery)
        return tries


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def is_right(incoming: Incoming) -> bool:
    """Return whether it is a message, with readable properties."""
    try:
        decode_any(incoming.body, incoming.content_type)
    except DecodeError:
        return False
    return incoming.unreadable is None


class WatchedBus(RabbitBus):
    """Notes what is read from it, and that it loses its connection."""

    seen: Seen
    lost = 0
    last: deque[Try]
    """The hostile messages that were read last."""

    async def consume(self, queue: Queue, **how: Any) -> Consumer:
        consumer = await super().consume(queue, **how)
        take = consumer.get_nowait

        def noted() -> Delivery | None:
            if (delivery := take()) is not None:
                self.last += self.seen.note(queue, delivery)
            return delivery

        consumer.get_nowait = noted  # type: ignore[method-assign]
        return consumer

    def note_change(self) -> None:
        self.lost += not self.usable


@dataclass
class FuzzedRun(Simulation):
    """The run that is fuzzed."""

    url: str = field(kw_only=True)
    name: str = field(kw_only=True)
    seed: int = 0
    tries: list[Try] = field(default_factory=list)
    rounds: int = 0
    buses: list[WatchedBus] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.topology = Topology.of(self.config)
        self.seen = Seen(self.topology.prefix)
        self.dice = random.Random(self.seed)
        self.taskset, self.eval_sets, self.step_seconds = None, {}, 0.01
        schedule = draw_schedule(0)
        self._settings = replace(schedule.settings, failing=0.0, crashing=0.0, token_seconds=0.0)
        self.engine = SimulatedEngine("engine-0", self._settings, ())
        self._replies = Queue(name=f"{self.topology.prefix}replies.submit.fuzz")
        self._trained: set[str] = set()
        self._gateway: Gateway | None = None

    def settings(self) -> dict[str, Any]:
        review = {"name": "human_review", "args": {"choose": {"reward_above": 1e9}, "seconds": 1, "default": "keep"}}
        return {
            **super().settings(),
            "name": self.name,
            "mode": "serve",
            "algorithm": {"repeat_times": 1, "estimator": {"kind": "group", "baseline": "none", "scale": "none"}},
            "buffer": {"batch_size": 1, "total_steps": 1_000_000},
            "operator": {"operators": [review]},
            "trainer": {"save_interval": 1000},
            "gateway": {"port": 0, "batch_wait": 1.0},
        }

    def bus(self) -> Any:
        made = WatchedBus(self.url, self.topology, config=self.config.broker, name=f"fuzz {len(self.buses)}")
        made.seen, made.last = self.seen, deque(maxlen=4)
        made.on_change(made.note_change)
        self.buses.append(made)
        return made

    # -- its life

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the agents inside the block, in which they have work to do."""
        engines = {"engine-0": self.engine}
        clients = SimulatedClients(engines)  # type: ignore[arg-type]
        with (
            mock.patch.object(gateway_agent, "EngineClients", return_value=clients),
            mock.patch.object(rabbit_consumer, "routing_problem", self._routing_problem),
        ):
            self._make_agents(engines)
            self.outside = RabbitBus(self.url, self.topology, config=self.config.broker, name="fuzz")
            await self.outside.connect()
            await self.outside.declare(
                *self.topology.durable, self.topology.sessions, self.topology.review, self._replies
            )
            for name, agent in self.agents.items():
                agent.run_folder = self.folder
                self.tasks[name] = asyncio.create_task(agent.run(), name=name)
            reader = asyncio.create_task(self._read_replies())
            try:
                async with aiohttp.ClientSession() as self.http:
                    await self._until(lambda: bool(self.gateway.detail().url), STARTS_WITHIN, "no gateway serves")
                    await self._handles_good_ones(STARTS_WITHIN)
                    yield
            finally:
                for task in (reader, *self.tasks.values()):
                    task.cancel()
                await asyncio.wait([reader, *self.tasks.values()])
                await self.outside.close()

    @property
    def gateway(self) -> Gateway:
        assert self._gateway is not None
        return self._gateway

    def _routing_problem(self, queue: Queue, *message: Any) -> str | None:
        """Note a message that its consumer keeps from its agent as one that was read."""
        problem = routing_problem(queue, *message)
        if problem is not None:
            _, _, _, body, _ = message
            for one in self.seen.of(queue.name, bytes(body)):
                one.seen = True
        return problem

    def _make_agents(self, engines: dict[str, Any]) -> None:
        workflows: Any = FakeWorkflowRunner(0, self._settings, engines, lambda: False, random.Random(0))
        common: dict[str, Any] = {"topology": self.topology}
        runner = Runner(
            self.config, bus=self.bus(), agent_id="runner-0", workflows=workflows, isolated=workflows, **common
        )
        self._gateway = Gateway(self.config, bus=self.bus(), agent_id="gateway-0", **common)
        agents = (self.make_explorer(), runner, self.make_operator(), self.make_trainer(), self._gateway)
        self.agents = {agent.id: agent for agent in agents}

    async def _read_replies(self) -> None:
        async with await self.outside.consume(self._replies) as feed:
            async for delivery in feed:
                with contextlib.suppress(DecodeError):
                    self._trained.add(decode(delivery.body, SubmissionOutcome, delivery.content_type).submission_id)
                await acknowledge(delivery)

    # -- a round

    async def fuzz(self, seconds: float, per_target: int = 2) -> None:
        """Try messages for so long.

        Raises:
            FuzzError: A fault was found.
        """
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            await self.round(per_target)

    async def round(self, per_target: int) -> None:
        """Try messages at each target, then good ones.

        Raises:
            FuzzError: A fault was found.
        """
        self.rounds += 1
        self.seen.tries.clear()
        now = [Try(draw(self.dice, target)) for target in TARGETS for _ in range(per_target)]
        for one in now:
            self.seen.expect(one)
        self.tries += now
        await asyncio.to_thread(self._publish, now)
        try:
            await self._until(lambda: all(self._is_over(one) for one in now), HANDLED_WITHIN, "messages are not read")
            await self._handles_good_ones(HANDLED_WITHIN)
            await self._read_dead()
            if lost := [name for name, bus in self._connections() if bus.lost]:
                raise FuzzError(f"{', '.join(lost)} lost the connection to the broker")
        except FuzzError as error:
            told = [f"not read: {one.hostile}" for one in now if not self._is_over(one)]
            told += [f"read last by {name}: {one.hostile}" for name, bus in self._connections() for one in bus.last]
            raise FuzzError("\n".join([f"round {self.rounds} of seed {self.seed}: {error}", *told])) from None

    def _connections(self) -> Iterator[tuple[str, WatchedBus]]:
        for name, agent in self.agents.items():
            assert isinstance(agent.bus, WatchedBus)
            yield name, agent.bus

    def _is_over(self, one: Try) -> bool:
        return one.hostile.target.name == "dead" or one.outcome != "unread"

    def _publish(self, tries: list[Try]) -> None:
        raw = RawPublisher(self.url)
        for one in tries:
            hostile = one.hostile
            exchange = self.topology.exchange(hostile.target.exchange)
            try:
                one.refused = not raw.publish(exchange, hostile.key.encode(), hostile.body, hostile.fields)
            except (EOFError, OSError):
                one.refused = True
            if one.refused:  # the broker has closed the channel
                raw.close()
                raw = RawPublisher(self.url)
        raw.close()

    async def _handles_good_ones(self, seconds: float) -> None:
        """Have a submitted task and a session trained on."""
        name, trained = f"good-{self.rounds}", self._sessions_trained()
        body = TaskSubmission(task=TaskBody(workflow="none", raw_task={"n": self.rounds}, repeat_times=1))
        mail = envelope(body, message_id=name, correlation_id=name, reply_to=self._replies.name)
        await self.outside.publish(self.topology.exchange("tasks"), "submit", mail)
        asked = {"model": "policy", "messages": [{"role": "user", "content": name}]}
        said = await self._ask("/v1/chat/completions", asked)
        await self._ask("/feedback", {"msg_ids": [said["id"]], "reward": 1.0})

        await self._until(lambda: name in self._trained, seconds, f"submitted task {name} has no outcome")
        trouble = f"session {said['id']} is not trained on"
        await self._until(lambda: self._sessions_trained() > trained, seconds, trouble)
        await self._until(self._is_caught_up, seconds, "the trainer has not passed all batches")

    def _is_caught_up(self) -> bool:
        return (self.trainer.detail().progress or 0) >= (self.explorer.detail().opened or 0)

    def _sessions_trained(self) -> int:
        return 0 if self.gateway.store is None else self.gateway.store.ledger.counts["trained"]

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(HANDLED_WITHIN)
        try:
            async with self.http.post(self.gateway.url + path, json=body, timeout=limit) as response:
                said: dict[str, Any] = await response.json()
                if response.status != 200:
                    raise FuzzError(f"the gateway answers {path} with {response.status}: {said}")
                return said
        except (aiohttp.ClientError, TimeoutError) as error:
            self._check_alive()
            raise FuzzError(f"the gateway does not answer {path}: {error!r}") from None

    async def _read_dead(self) -> None:
        """Have the command's reader read the dead letters, then take them away."""
        found, total = await letters(self.outside, self.topology, 1000)
        for number, listed in enumerate(found, 1):
            paragraph(number, row(listed), 80)
        async with await self.outside.consume(self.topology.dead) as feed:
            with contextlib.suppress(TimeoutError):  # some may expire meanwhile
                for _ in range(total):
                    async with asyncio.timeout(1.0):
                        letter = await anext(feed)
                    self._bury(letter)
                    await acknowledge(letter)

    def _bury(self, letter: Delivery) -> None:
        queue = str(letter.headers.get("dead-queue") or letter.headers.get("x-first-death-queue") or "")
        for one in (*self.seen.of(queue, letter.body), *self.seen.of(self.topology.dead.name, letter.body)):
            one.dead = True

    async def _until(self, holds: Any, seconds: float, trouble: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():  # the broker and the agents tell nobody what they have not read
                    self._check_alive()
                    await asyncio.sleep(LOOK_AGAIN)
        except TimeoutError:
            states = ", ".join(
                f"{name} is {agent.state} and waits for {agent.waits_for} {agent.detail()}"
                for name, agent in self.agents.items()
            )
            raise FuzzError(f"{trouble} within {seconds:g} s: {states}") from None
        self._check_alive()

    def _check_alive(self) -> None:
        for name, task in self.tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                told = "without an error" if error is None else "".join(traceback.format_exception(error))
                raise FuzzError(f"{name} has ended: {told}")

    # -- what came of it

    def summary(self) -> str:
        """Return how many tries there were, by consumer and outcome."""
        counts = Counter((one.hostile.target.name, one.outcome) for one in self.tries)
        told = ", ".join(f"{name} {outcome} {count}" for (name, outcome), count in sorted(counts.items()))
        return f"{len(self.tries)} tries in {self.rounds} rounds: {told}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the agents log: each hostile message costs a line."""
    before = structlog.get_config()

    def drop(logger: object, method: str, event: Any) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])
    try:
        yield
    finally:
        structlog.configure(**before)
