"""One whole run under the faults of one seed, and what must hold at its end whatever they were."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from structlog.testing import capture_logs

from tests.unit.agents.faulty import FaultyBus, Lots, told
from trinity_agents.explorer.agent import Explorer
from trinity_agents.operator.agent import Operator
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.process_pool import ChildDied
from trinity_agents.simulation import NumberedTasks, Simulation
from trinity_agents.trainer.agent import Trainer
from trinity_agents.trainer.history import lineage
from trinity_mq.bus import BusUnavailable
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchReady, Progress, TaskResult, TaskSlice, decode_any
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import EXPERIENCES
from trinity_mq.runtime.errors import RestartMe, first_leaf
from trinity_mq.testing.fakes import FakeLearner, one_experience
from trinity_mq.testing.virtual_time import run_virtually

BATCHES, TASKS, RUNS, SLICE = 5, 2, 4, 2
LIMIT = 4000.0
"""Virtual seconds until a run counts as hung."""
Run = tuple[int, int, int]
"""(batch, task, run)."""


class Workflows:
    """In place of WorkflowRunner and ProcessPool: a workflow that takes its time and fails where the lots say so."""

    def __init__(self, lots: Lots, engine: Any, is_pool: bool = False) -> None:
        self._lots, self._engine, self._is_pool = lots, engine, is_pool

    async def run_slice(
        self, task_slice: TaskSlice, models: Callable[[], InferenceModel], results: object = None
    ) -> SliceOutcome:
        while (version := self._version(models)) is None:  # noqa: ASYNC110  # as a runner would: nobody tells it
            await asyncio.sleep(0.2)
        await asyncio.sleep(self._lots.dice.choice([0.01, 0.1, 0.5, 2.0]))
        if self._is_pool and self._lots.dice.random() < 0.1:
            raise ChildDied("its process was killed by lot")
        runs = [
            run
            for run in range(task_slice.run_base, task_slice.run_base + task_slice.repeat_times)
            if task_slice.lane == "eval" or not self._lots.fails(task_slice.batch, task_slice.task_id, run)
        ]
        return SliceOutcome(
            experiences=[one_experience(task_slice, run, version) for run in runs],
            runs=runs,
            metrics=[{"reward": 1.0, "accuracy": 1.0} for _ in runs],
            version_min=version,
            version_max=version,
        )

    async def run(
        self, task_slice: TaskSlice, config: object, models: Callable[[], InferenceModel], results: object = None
    ) -> SliceOutcome:
        return await self.run_slice(task_slice, models)

    async def close(self) -> None:
        """Nothing to close."""

    def _version(self, models: Callable[[], InferenceModel]) -> Any:
        try:
            models()
        except EngineLost:
            return None
        return None if self._engine.paused else self._engine.snapshot.version


@dataclass
class Schedule(Simulation):
    """A run under the faults of one seed, all of its agents real and started again when they die."""

    lots: Lots = field(default_factory=lambda: Lots(0))
    lives: list[FaultyBus] = field(default_factory=list)
    living: dict[str, Agent] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    """Who was asked to end, and is to be started again."""
    ends: list[str] = field(default_factory=list)
    """How lives ended that were not drawn to end."""
    strange: list[BaseException] = field(default_factory=list)
    """What agents raised that is no way to ask for a restart."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """The run is over, and what is left is drained, as its supervisor would."""

    def __post_init__(self) -> None:
        dice = self.lots.dice
        self.batches = BATCHES
        self.step_seconds = dice.choice([0.05, 0.5, 2.0])
        self.limit = dice.choice([4, 1000])
        self.deadline = dice.choice([60, 60, 5])
        self.batch_timeout = dice.choice([3600, 3600, 3])
        offset = dice.choice([0, 1, 4])
        self.overrides = (
            f"algorithm.repeat_times={RUNS}",
            f"explorer.max_repeat_times_per_runner={SLICE}",
            f"explorer.operator_deadline={self.deadline}",
            f"explorer.batch_timeout={self.batch_timeout}",
            *(["explorer.max_timeout=1", "explorer.max_retry_times=0"] if self.batch_timeout < 10 else []),
            "explorer.max_consecutive_empty=1000",
            f"broker.delivery_limit={self.limit}",
            f"synchronizer.sync_offset={offset}",
            "synchronizer.sync_timeout=5",
            f"trainer.save_interval={dice.choice([1, 2, 10])}",
            f"runner.concurrency={dice.choice([1, 2, 8])}",
            *self.overrides,
        )
        super().__post_init__()

    def life(self, role: str) -> FaultyBus:
        """Return the connection of a new life of a role."""
        bus = FaultyBus(self.broker, self.topology, self.config.broker, self.lots, role)
        self.lives.append(bus)
        return bus

    # -- who takes part

    def new_runner(self, name: str) -> Agent:
        workflows: Any = Workflows(self.lots, self.engine)
        pool: Any = Workflows(self.lots, self.engine, is_pool=True)
        bus = self.life("runner")
        return Runner(self.config, bus=bus, topology=self.topology, agent_id=name, workflows=workflows, isolated=pool)

    def new_operator(self, name: str) -> Agent:
        return Operator(self.config, bus=self.life("operator"), topology=self.topology, agent_id=name)

    def new_explorer(self, name: str) -> Agent:
        return Explorer(
            self.config,
            bus=self.life("explorer"),
            topology=self.topology,
            agent_id=name,
            engine=self.engine,
            folder=self.folder,
            taskset=NumberedTasks(RUNS),
            eval_sets=self.eval_sets,
            metrics=self,  # type: ignore[arg-type]
        )

    def new_trainer(self, name: str) -> Agent:
        trainer = Trainer(
            self.config,
            bus=self.life("trainer"),
            topology=self.topology,
            agent_id=name,
            learner=FakeLearner(self.step_seconds),
            channel=self.channel,
            folder=self.folder,
            metrics=self,  # type: ignore[arg-type]
        )
        self.trainers.append(trainer)
        return trainer

    async def keep(self, name: str, make: Callable[[str], Agent]) -> None:
        """Run an agent, again after each death, until it ends by itself."""
        while True:
            agent = make(name)
            bus = self.lives[-1]
            life = bus.life = asyncio.create_task(agent.run())
            over = asyncio.create_task(self._drained(agent))
            self.living[name] = agent
            await asyncio.wait([life])
            del self.living[name]
            over.cancel()
            if bus.dead:
                await bus.close()
            elif (error := life.exception()) is None:
                if name not in self.drained:
                    return
                self.drained.remove(name)
            else:
                cause = first_leaf(error)
                self.ends.append(f"{name}: {type(cause).__name__}: {cause}")
                if not isinstance(cause, RestartMe | BusUnavailable):
                    self.strange.append(error)
                    return
            if self.over.is_set():
                return
            await asyncio.sleep(self.lots.dice.choice([0.05, 0.5, 3.0]))

    async def _drained(self, agent: Agent) -> None:
        """Drain an agent that is left when the run is over."""
        await self.over.wait()
        agent.drain()

    # -- what goes wrong

    async def cut(self, start: float, seconds: float) -> None:
        await asyncio.sleep(start)
        living = [bus for bus in self.lives if bus.life is not None and not bus.life.done() and not bus.dead]
        if living:
            self.broker.drop(self.lots.dice.choice(living), delay=seconds)

    async def alarm(self, start: float, seconds: float) -> None:
        await asyncio.sleep(start)
        self.broker.block()
        await asyncio.sleep(seconds)
        self.broker.unblock()

    async def restart(self, start: float) -> None:
        await asyncio.sleep(start)
        for bus in self.lives:
            if bus.life is not None and not bus.life.done() and not bus.dead:
                self.broker.drop(bus, delay=2.0 + self.lots.dice.random())

    async def drain(self, start: float) -> None:
        await asyncio.sleep(start)
        if self.living:
            name = self.lots.dice.choice(sorted(self.living))
            self.drained.add(name)
            self.living[name].drain()

    async def suffer(self) -> None:
        """Run to the end."""
        await self.record_messages()
        violence = [self.cut(*one) for one in self.lots.cuts] + [self.alarm(*one) for one in self.lots.alarms]
        violence += [self.restart(one) for one in self.lots.restarts] + [self.drain(one) for one in self.lots.drains]
        standby = self.lots.dice.random() < 0.2
        async with asyncio.TaskGroup() as group:
            explorers = [group.create_task(self.keep("explorer-0", self.new_explorer))]
            if standby:
                explorers.append(group.create_task(self.keep("explorer-1", self.new_explorer)))
            for name in ("runner-0", "runner-1"):
                group.create_task(self.keep(name, self.new_runner))
            for name in ("operator-0", "operator-1"):
                group.create_task(self.keep(name, self.new_operator))
            group.create_task(self.keep("trainer-0", self.new_trainer))
            beside = [group.create_task(one) for one in violence]
            await asyncio.wait(explorers)
            self.over.set()
            for one in beside:
                one.cancel()
            if self.broker.blocked:
                self.broker.unblock()

    # -- what must hold

    def processed(self) -> dict[int, tuple[BatchReady, list[str]]]:
        """Return what decides each batch, from the stream alone: the first complete set of its ticket, and its ids."""
        sets: defaultdict[tuple[str, str], dict[int, bytes]] = defaultdict(dict)
        decided: dict[int, tuple[BatchReady, list[str]]] = {}
        for stored in self.stream()._messages:
            headers = stored.headers
            if stored.content_type == EXPERIENCES:
                sets[str(headers["ticket"]), str(headers["op"])].setdefault(int(str(headers["n"])), stored.body)
                continue
            message = decode_any(stored.body, stored.content_type)
            if isinstance(message, BatchReady) and isinstance(message.batch, int) and message.batch not in decided:
                chunks = sets[message.ticket, message.op]
                bodies = [chunks[n] for n in range(message.chunks)]
                rids = [rid for body in bodies for rid in ExperienceBatch.decode(body).ids("rid")]
                decided[message.batch] = (message, rids)
        return decided

    def check(self) -> None:
        """Every run of every task is in its processed batch exactly once, or has an outcome that says why not."""
        assert not self.strange, self.strange
        state = self.state()
        assert state.finished
        assert not state.tickets, f"open at the end: {list(state.tickets)}"
        assert not state.following.tickets, f"not consumed at the end: {list(state.following.tickets)}"
        manifests = self.manifests()
        processed = self.processed()
        assert sorted(processed) == sorted(manifests) == list(range(1, BATCHES + 1))
        failed = self._unfinished_slices()
        for batch, manifest in manifests.items():
            self.check_batch(batch, manifest, *processed[batch], failed)
        # one started at the very end, in place of a drained one, may be told to end before it has a generation
        generation = max(trainer.loop.generation for trainer in self.trainers)
        history = lineage(self.folder / "history", generation, BATCHES)
        assert [entry["batch"] for entry in history] == list(range(1, BATCHES + 1))
        for entry in history:
            self.check_trained(entry, *processed[entry["batch"]])

    def check_trained(self, entry: dict[str, Any], ready: BatchReady, rids: list[str]) -> None:
        """Compare what the trainer did with what was decided for it."""
        assert (entry["ticket"], entry["op"]) == (ready.ticket, ready.op)
        if entry["outcome"] not in {"trained", "dropped", "skipped"}:
            assert entry["outcome"] == ready.state, f"batch {ready.batch}: {entry['outcome']}, was {ready.state}"
            return
        # where a trainer goes back to its checkpoint, or an engine is adopted by another explorer, open batches are
        # sampled from weights older than allowed: whole groups may be left out, never silently
        calm = not any(bus.dead for bus in self.lives) and not (
            self.lots.cuts or self.lots.restarts or self.lots.drains
        )
        died = len(self.trainers) - 1
        assert entry["outcome"] == "trained" or not calm, f"{entry['outcome']}, though nobody died"
        assert entry["outcome"] != "skipped" or died > 1, "no trainer may give up a batch that killed none"
        if entry["outcome"] != "skipped":
            trained = Counter("/".join(uid.split("/")[:3]) for uid in entry["uids"])
            left_out = Counter(rids) - trained
            assert trained + left_out == Counter(rids), f"trained beyond what was decided: {trained - Counter(rids)}"
            told_of = {told.dropped for told in self.published(Progress) if told.ticket == ready.ticket}
            assert left_out.total() in told_of, f"left out: {left_out}, told: {told_of}"
            assert not left_out or not calm, f"left out, though nobody died: {left_out}"

    def manifests(self) -> dict[int, BatchClosed]:
        """Return the manifest of each batch; however often it was published, it is the same."""
        found: dict[int, BatchClosed] = {}
        for manifest in self.published(BatchClosed):
            assert isinstance(manifest.batch, int)
            assert found.setdefault(manifest.batch, manifest) == manifest, f"batch {manifest.batch} has two manifests"
        return found

    def check_batch(
        self, batch: int, manifest: BatchClosed, ready: BatchReady, rids: list[str], failed: set[tuple[str, int, int]]
    ) -> None:
        assert sum(manifest.outcomes.values()) == TASKS * RUNS // SLICE, "every slice has exactly one outcome"
        listed = [(batch, one.task_id, run) for one in manifest.accepted for run in one.runs]
        twice = [run for run, count in Counter(listed).items() if count > 1]
        assert not twice, f"accepted twice: {twice}"
        wanted = {(batch, task, run) for task in range(TASKS) for run in range(RUNS)}
        missing = {run for run in wanted - set(listed) if not self.lots.fails(*run)}
        given_up = {run for run in missing if (manifest.ticket, run[1], run[2] // SLICE * SLICE) in failed}
        cut_off = {(task, run // SLICE) for _, task, run in missing - given_up}
        assert len(cut_off) <= manifest.outcomes.get("cancelled", 0), f"missing: {sorted(missing - given_up)}"
        assert not manifest.outcomes.get("cancelled") or self.batch_timeout < 10
        assert not any(self.lots.fails(*one) for one in listed)
        if ready.state in {"failed", "gone"}:
            assert self.limit < 10 or self.deadline < 10, f"batch {batch} was given up: {ready.reason}"
            assert not rids
            return
        groups = Counter(task for _, task, _ in listed)
        kept = Counter(f"{b}/{task}/{run}" for b, task, run in listed if groups[task] >= RUNS // 2)
        found = Counter(rids)
        assert found == kept, f"double: {found - kept}, missing: {kept - found}"
        assert ready.experiences == len(rids)

    def _unfinished_slices(self) -> set[tuple[str, int, int]]:
        """Return the slices that a runner gave up, with an outcome that says so."""
        return {
            (result.ticket, result.task_id, result.run_base)
            for result in self.published(TaskResult)
            # here a workflow without an engine waits beyond the time of its slice, and is ended
            if result.outcome == "poisoned" or "time was over" in (result.message or "")
        }


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Draw also the library's jitter and its ids by the seed, so that a seed is a schedule."""
    dice = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    with mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=dice.getrandbits(128), version=4)):
        try:
            yield
        finally:
            random.setstate(state)


def play(seed: int, folder: Path) -> Schedule:
    """Play the schedule of a seed and check it.

    Raises:
        AssertionError: Something does not hold; names the seed.
    """
    schedule = Schedule(folder, lots=Lots(seed))
    drawn_lots = told(schedule.lots)
    try:
        with drawn(seed), capture_logs():
            run_virtually(schedule.suffer(), limit=LIMIT)
        schedule.check()
    except BaseException as error:
        error.add_note(f"SEED={seed} pytest -k simulation plays it again; drawn: {drawn_lots}; ends: {schedule.ends}")
        raise
    return schedule
