"""A trainer that only syncs, hosts of engines, and engines, as processes that kill themselves at a step of the gate.

``python -m tests.chaos.sync_victims trainer|engine-host ID CONFIG_FILE`` with ``CHAOS_POINT="said go:2"``: SIGKILL when
go has been published for the second time. Points: ``saying``, ``said`` and ``heard`` with an event's verb, in a trainer
or a host; ``engine pause``, ``engine receive``, ``engine applying`` and ``engine commit`` in an engine; in both,
``broadcast``, a bucket of the collective. ``CHAOS_ENGINE_POINTS`` are the ends of an engine's lives, with commas; it
knows by the notes of its predecessors which of them is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.chaos.victims import NOTES_VARIABLE, POINT, PointedFeed
from trinity_agents.engine import agent as engine_daemon
from trinity_agents.explorer import hosted_engines
from trinity_agents.explorer.engine_hosting import EngineHosting
from trinity_mq.bus import Bus, Consumer, Delivery, Envelope, LockHeld, Queue, Topology
from trinity_mq.config import Config
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.engines.server.admin_api import AdminApi
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.messages import SyncEvent, TrainerStatus
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.sync.channels.collective import broadcast as collective
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.gate import coordinator_driver
from trinity_mq.sync.gate.coordinator_driver import CoordinatorDriver
from trinity_mq.training.model.policy import Policy

ENGINE_POINTS_VARIABLE = "CHAOS_ENGINE_POINTS"
CANARY = (2, 3, 4, 5, 6, 7, 3, 5, 2, 6)
STEP_SECONDS = 0.2
LEASE = 6.0
"""Seconds without a join event after which an engine is no longer a member: shorter than a run's."""
LOCK_RETRY = 0.5


class Weights:
    """A policy that takes steps by chance."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._dice = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self) -> None:
        """Change every weight a little."""
        for parameter in self._policy.parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=self._dice))

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        return self._policy.manifest()

    async def weights(self) -> Any:
        return self._policy.weights()

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return self._policy.sequence_logprobs(tokens)


class SyncTrainer(Agent):
    """Keeps every version that it commits as a file, ``GENERATION.STEP.safetensors``, for the test to look at."""

    role = "trainer"
    gate: CoordinatorDriver

    def detail(self) -> TrainerStatus:
        if not hasattr(self, "gate"):
            return TrainerStatus()
        return TrainerStatus(committed=self.gate.machine.committed, sync=self.gate.report())

    async def serve(self) -> None:
        while True:
            try:
                lock = await self.bus.lock(self.topology.lock("trainer"))
                break
            except LockHeld:
                await self.woken.wait(LOCK_RETRY)
        del lock  # held as long as we are connected
        folder = ensure_model_folder(self.config.model, self.config.path / "model", self.config.seed)
        kept = self.config.path / "kept"
        kept.mkdir(exist_ok=True)
        generation = 1 + max((int(path.name.split(".")[0]) for path in kept.iterdir()), default=0)
        weights = Weights(Policy(self.config.model, folder, 0), generation)
        self.gate = CoordinatorDriver(
            name=self.id,
            config=self.config.synchronizer,
            dtype="float32",
            weights=weights,
            channel=open_channel(self.config),
            canary=CANARY,
            publish=self._publish,
        )
        verbs = ("join", "leave", "ready", "applied", "failed")
        ears = self.topology.listener(self.id, self.incarnation, "sync", *(f"weights.{verb}" for verb in verbs))
        await self.bus.declare(ears)
        async with await self.bus.consume(ears) as feed:
            await self.run_with_background(
                self._steps(generation, weights, kept), self.gate.run(feed, self.each), self._tell()
            )

    async def _steps(self, generation: int, weights: Weights, kept: Path) -> None:
        step = 0
        while not self.draining.is_set():
            name = f"{generation}.{step}.safetensors"
            save_file(dict(await weights.weights()), kept / f"{name}.part")
            (kept / f"{name}.part").rename(kept / name)
            await self.gate.sync((generation, step), step)
            with contextlib.suppress(TimeoutError):  # a train step
                await asyncio.wait_for(self.draining.wait(), STEP_SECONDS)
            weights.step()
            step += 1

    async def _tell(self) -> None:
        while True:
            await self.gate.changed.wait()
            self.heartbeat_soon()

    async def _publish(self, event: SyncEvent) -> None:
        await self.publish("sync", f"weights.{event.verb}", event)


def verb_of(routing_key: str) -> str:
    """Return the verb of a sync event, empty for another message."""
    return routing_key.removeprefix("weights.") if routing_key.startswith("weights.") else ""


class SyncFeed(PointedFeed):
    """Passes a point at each sync event that arrives."""

    def passed(self, delivery: Delivery) -> Delivery:
        """Pass the points of a delivery."""
        if verb := verb_of(delivery.routing_key):
            POINT.passed(f"heard {verb}")
        return super().passed(delivery)


def with_sync_points(bus: Bus) -> Bus:
    """Pass points before and after each sync event that is published, and at each that arrives."""
    publish, consume = bus.publish, bus.consume

    async def publish_pointed(exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        verb = verb_of(routing_key)
        POINT.passed(f"saying {verb}")
        routed = await publish(exchange, routing_key, envelope, **how)
        POINT.passed(f"said {verb}")
        return routed

    async def consume_pointed(queue: Queue, **how: Any) -> Consumer:
        return SyncFeed(await consume(queue, **how))

    bus.publish, bus.consume = publish_pointed, consume_pointed  # type: ignore[method-assign]
    return bus


def at_each_bucket() -> None:
    """Pass a point after each bucket of a broadcast."""
    broadcast = collective.Group.broadcast

    def pointed(self: collective.Group, flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for flat in broadcast(self, flats):
            POINT.passed("broadcast")
            yield flat

    collective.Group.broadcast = pointed  # type: ignore[method-assign]


def as_engine(arguments: Sequence[str]) -> None:
    """Be an engine; dies at the first point at which none of its predecessors has."""
    died = {note.read_text() for note in Path(os.environ[NOTES_VARIABLE]).iterdir()}
    ends = filter(None, os.environ.get(ENGINE_POINTS_VARIABLE, "").split(","))
    POINT.set(next((end for end in ends if end.partition(":")[0] not in died), None))
    for name in ("pause", "receive", "commit"):
        handler = getattr(AdminApi, name)

        async def pointed(self: AdminApi, request: Any, name: str = name, handler: Any = handler) -> Any:
            POINT.passed(f"engine {name}")
            return await handler(self, request)

        setattr(AdminApi, name, pointed)
    apply = TextGenerator.apply

    def applying(self: TextGenerator, checked: Any) -> None:
        names = list(checked)
        apply(self, {name: checked[name] for name in names[: len(names) // 2]})
        POINT.passed("engine applying")
        apply(self, checked)

    TextGenerator.apply = applying  # type: ignore[method-assign]
    at_each_bucket()
    code = engine_daemon.main(arguments)
    os._exit(code)


def build(role: str, agent_id: str, config: Config) -> Callable[[Bus, Topology], Agent]:
    """Return what makes the agent."""

    def made(bus: Bus, topology: Topology) -> Agent:
        bus = with_sync_points(bus)
        if role == "trainer":
            at_each_bucket()
            return SyncTrainer(config, bus=bus, topology=topology, agent_id=agent_id)
        command = [sys.executable, "-m", "tests.chaos.sync_victims", "engine"]
        host = EngineHost(config, config.path, f"{agent_id}-engine", command=command)
        return EngineHosting(config, bus=bus, topology=topology, agent_id=agent_id, engines=[host])

    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, *rest = sys.argv[1:]
    if role == "engine":
        as_engine(rest)
    agent_id, path = rest
    config = Config.model_validate_json(Path(path).read_text())
    kind: Any = "trainer" if role == "trainer" else "engine"
    coordinator_driver.MEMBER_LEASE = hosted_engines.MEMBER_LEASE = LEASE
    sys.exit(run_daemon(config, agent_id, kind, build(role, agent_id, config)))
