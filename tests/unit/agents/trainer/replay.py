"""A recorded stream of processed batches, and trainers as processes of their own that train on it.

The batches are made by the real explorer and operator. A trainer reads them from a broker in its own memory, so it has
nothing of the process before it but the run's folder. It may be killed wherever it touches the file system: an audit
hook of the interpreter sees each such moment, and nothing of the trainer's inside is named.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
from transformers.utils.logging import disable_progress_bar

from trinity_agents.simulation import Simulation
from trinity_agents.trainer.agent import Trainer
from trinity_mq.bus import Bus, Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.config import Config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import ExplorerStatus, TaskSlice, Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.testing.fakes import FakeChannel, FakeRunner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.learner import TorchLearner

LEFT_OUT = {"mark", "run_end"}
"""Kinds of messages that belong to the recorded run's own trainer and end."""
ROLES = ("asks", "answers")
VOCABULARY = 16
"""Of the tiny model."""


class Kill(NamedTuple):
    """The moment at which a process ends by SIGKILL."""

    event: str
    """Of the interpreter's audit events, such as ``os.rename``."""
    path: str
    """Expression that is found in the event's first argument."""


def an_experience(task_slice: TaskSlice, run: int, version: Version) -> Experience:
    """Return a random answer of some length, with logprobs near those of random weights."""
    dice = random.Random(f"{task_slice.batch}/{task_slice.task_id}/{run}")
    prompt, response = dice.randint(2, 5), dice.randint(3, 9)
    return Experience(
        eid=EID(batch=task_slice.batch, task=task_slice.task_id, run=run),
        tokens=torch.tensor([dice.randrange(2, VOCABULARY) for _ in range(prompt + response)], dtype=torch.int32),
        prompt_length=prompt,
        logprobs=torch.tensor([dice.gauss(-2.77, 0.1) for _ in range(response)]),
        reward=float(dice.random() < 0.5),
        info={"role": ROLES[task_slice.task_id % len(ROLES)]},
        versions=[(0, *version)],
        temperature=1.0,
    )


class Recorded(Simulation):
    """A run with such experiences."""

    async def runner(self, bus: Any, topology: Topology) -> None:
        await FakeRunner(bus, topology, lambda: self.engine.snapshot.version, make=an_experience).run()


def record(folder: Path, file: Path, batches: int, settings: Sequence[str]) -> None:
    """Run ``batches`` batches in virtual time, and write the messages of the ready stream."""
    folder.mkdir(parents=True)
    sim = Recorded(folder, tuple(settings), batches=batches, step_seconds=0.01)
    run_virtually(sim.run(), limit=2000)

    async def read() -> list[dict[str, Any]]:
        found = []
        bus = await sim.client()
        async for one in read_up_to_now(bus, sim.topology.ready, new_mark(), offset=0):
            if one.kind not in LEFT_OUT:
                fields = {"key": one.routing_key, "body": one.body, "kind": one.kind, "message_id": one.message_id}
                found.append({**fields, "content_type": one.content_type, "headers": dict(one.headers)})
        return found

    messages = run_virtually(read(), limit=100)
    file.write_bytes(msgpack.packb({"run_id": sim.state().run_id, "messages": messages}))


class StandIn(Agent):
    """Says what the explorer of the recorded run would, and ends the run when enough is trained."""

    role = "explorer"

    def __init__(self, config: Config, *, bus: MemoryBus, topology: Topology, run_id: str, batches: int) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id="explorer-0")
        self._run_id, self._batches, self._over = run_id, batches, False

    def detail(self) -> ExplorerStatus:
        return ExplorerStatus(run_id=self._run_id, open=[], finished=self._over)

    async def serve(self) -> None:
        await self.woken.until(lambda: (self.peers.trainer.progress or 0) >= self._batches)
        self._over = True
        self.heartbeat_now()
        await self.woken.until(lambda: all(beat.state == "finished" for beat in self.peers.alive("trainer")))


class ReplayTrainer(Trainer):
    """The trainer, on a broker of its own that holds the recorded stream."""

    def __init__(self, config: Config, topology: Topology, file: Path, batches: int) -> None:
        self._broker, self._recorded, self._batches = MemoryBroker(), msgpack.unpackb(file.read_bytes()), batches
        self._make = lambda: MemoryBus(self._broker, topology, config=config.broker)
        model = ensure_model_folder(config.model, config.path / "model", config.seed)
        super().__init__(
            config,
            bus=self._make(),
            topology=topology,
            agent_id="trainer-0",
            learner=TorchLearner(config, model, 100),
            channel=FakeChannel(),
            metrics=MetricsWriter(config.path, "trainer", "trainer-0", tensorboard=False),
        )

    async def run(self) -> None:
        await (feeder := self._make()).connect()
        await feeder.declare(*self.topology.durable)
        for one in self._recorded["messages"]:
            key = one.pop("key")
            await feeder.publish(self.topology.exchange("ready"), key, Envelope(**one))
        run_id, bus = self._recorded["run_id"], self._make()
        explorer = StandIn(self.config, bus=bus, topology=self.topology, run_id=run_id, batches=self._batches)
        await self.run_with_background(super().run(), explorer.run())


def _child(folder: Path, file: Path, settings: Sequence[str], batches: int, kill: Kill | None) -> None:
    disable_progress_bar()  # its lock is a semaphore, which a killed process leaves behind
    if kill is not None:

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == kill.event and arguments and re.search(kill.path, os.fsdecode(str(arguments[0]))):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    own = (f"run_dir={folder}", "broker.url=amqp://nobody@127.0.0.1:9", "synchronizer.sync_interval=1000")
    config = Simulation(folder, (*settings, *own), batches=batches).config
    build = functools.partial(_build, config=config, file=file, batches=batches)
    sys.exit(run_daemon(config, "trainer-0", "trainer", build))


def _build(bus: Bus, topology: Topology, *, config: Config, file: Path, batches: int) -> ReplayTrainer:
    return ReplayTrainer(config, topology, file, batches)


def started(
    folder: Path, file: Path, settings: Sequence[str], batches: int, kill: Kill | None = None
) -> multiprocessing.process.BaseProcess:
    """Start a trainer that trains until so many batches of the stream are progress."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.qwen3.modeling_qwen3"])
    process = context.Process(target=_child, args=(folder, file, settings, batches, kill), daemon=True)
    process.start()
    return process
