"""A run of 200 tasks on a real broker: explorer, runners and operators as processes that are killed, frozen and cut off
while it goes on; the trainer, with a learner that only takes note, in the test itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.chaos.victims import NOTES_VARIABLE, POINT_VARIABLE, SEED_VARIABLE, SIGNAL_VARIABLE
from trinity_agents.trainer.agent import Trainer
from trinity_agents.trainer.history import lineage
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import load_config
from trinity_mq.experience import Experience
from trinity_mq.proof.invariants import Expected, one_outcome, streams_decode, trained_once
from trinity_mq.proof.record import Record, read_record
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE
from trinity_mq.testing.fakes import FakeChannel, FakeLearner

BATCHES, TASKS, RUNS = 25, 8, 4
ROOT = Path(__file__).parents[2]
LIMIT = 200.0
STARTS = 60
"""Starts of one agent until the test gives up: more than any of them needs."""

Id = tuple[int, int, int]
"""(batch, task, run)."""


class NotingLearner(FakeLearner):
    """Learns nothing; tells whoever waits how far the run is, and goes no further than it may."""

    def __init__(self, changed: Notifier) -> None:
        super().__init__(step_seconds=0.0)
        self._changed = changed
        self.may_do = BATCHES

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Take note."""
        await self._changed.until(lambda: len(self.steps) < self.may_do)
        values = await super().step(experiences, step_number)
        self._changed.notify()
        return values


class Arena:
    """One run and the violence that is done to it. Every act is printed with its time.

    Args:
        folder: Of the run.
        url: The broker's.
        name: Of the run on the broker.
        points: By agent id, where each of its lives ends, first to last, and at which time there at the latest:
            ``("confirmed task_result", 8)``. After these it lives on, once no other of its role has such an end before
            it: what it would do then is left for them to die of.
        frozen: By agent id, where its first life freezes at the first time, until somebody sends it SIGCONT.
        urls: By agent id, another way to the broker.
        overrides: Further settings.
        limit: Seconds until the run counts as stuck.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        name: str,
        *,
        points: dict[str, list[tuple[str, int]]] | None = None,
        frozen: dict[str, str] | None = None,
        urls: dict[str, str] | None = None,
        overrides: Sequence[str] = (),
        limit: float = LIMIT,
    ) -> None:
        self.seed = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 16)))
        dice = random.Random(self.seed)
        self.config = load_config(
            {
                "name": name,
                "run_dir": str(folder),
                "model": {"tiny": {}},
                "algorithm": {"repeat_times": RUNS},
                "buffer": {"batch_size": TASKS, "total_steps": BATCHES},
                "explorer": {
                    "eval_on_startup": False,
                    "eval_interval": 1000,
                    "max_repeat_times_per_runner": 2,
                    # a slice that got lost is cancelled in the end, so that the test can say which one it was; on a
                    # busy machine a runner that is started again may need 40 s
                    "max_timeout": 60,
                    "max_retry_times": 1,
                    "batch_timeout": 150,
                    "unfinished": "drop",
                },
                # the innocent are given back with the killer's slice: nobody is to be called poisoned here
                "broker": {"delivery_limit": 100},
                "runner": {"concurrency": 4},
                # five batches are open at a time
                "synchronizer": {"sync_interval": 1, "sync_offset": 4, "sync_timeout": 10},
                "monitor": {"tensorboard": False},
            },
            overrides,
        )
        self.topology = Topology(name)
        self._limit = limit
        self._folder, self._url, self._urls = folder, url, urls or {}
        self._points = {
            agent: [f"{name}:{dice.randint(1, most)}" for name, most in ends] for agent, ends in (points or {}).items()
        }
        self._frozen = {agent: f"{name}:1" for agent, name in (frozen or {}).items()}
        self._doomed: set[str] = set()
        """Agents whose present life ends at a point."""
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._notes = folder / "deaths"
        self._changed = Notifier()
        self._learner = NotingLearner(self._changed)
        self._started = time.monotonic()
        self._over = False
        self.deaths: list[tuple[str, str]] = []
        """Who died, and where."""
        self.ask_broker: Callable[[], Awaitable[str]] | None = None
        """What the broker can say about itself, where a run is stuck."""

    def say(self, act: str) -> None:
        """Print a line that a person can follow."""
        seconds = time.monotonic() - self._started
        sys.stdout.write(f"[{seconds:7.2f} s, {len(self._learner.steps):2} batches] {act}\n")
        sys.stdout.flush()

    # -- the run

    async def play(self, violence: Callable[[], Awaitable[None]], *agents: str) -> None:
        """Run to the end with the trainer and ``agents`` (such as ``runner-0``), while ``violence`` is done.

        Raises:
            AssertionError: It was not over in time; says what is missing by then.
        """
        self._notes.mkdir(parents=True)
        (self._folder / "config.json").write_text(self.config.model_dump_json())
        self.say(f"seed {self.seed}: SEED={self.seed} plays it with the same lots")
        try:
            async with asyncio.timeout(self._limit):
                await self._played(violence, agents)
        except TimeoutError:
            raise AssertionError(await self._stuck()) from None
        finally:
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _played(self, violence: Callable[[], Awaitable[None]], agents: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as group:
            trainer = group.create_task(self._trainer())
            kept = [group.create_task(self._keep(agent)) for agent in agents]
            await violence()
            await asyncio.wait([task for task, agent in zip(kept, agents, strict=True) if "explorer" in agent])
            self.say("the explorer has finished")
            self._over = True
            await trainer
            await self._end()

    async def progress(self, batches: int) -> None:
        """Return once so many batches have been trained on."""
        await self._changed.until(lambda: len(self._learner.steps) >= batches)

    async def all_dead(self, role: str) -> None:
        """Return once every end that is set for agents of a role has come."""
        await self._changed.until(lambda: not self._ends_left(role))

    def may_do(self, batches: int) -> None:
        """Let the trainer step up to batch ``batches`` only: so far the run goes, and five more are opened."""
        self._learner.may_do = batches
        self._changed.notify()

    def _ends_left(self, role: str) -> bool:
        left = {agent for agent, ends in self._points.items() if ends} | self._doomed
        return any(agent.startswith(role) for agent in left)

    def send(self, agent: str, number: int) -> None:
        """Send a signal to an agent's process."""
        self.say(f"{signal.Signals(number).name} to {agent}")
        self._processes[agent].send_signal(number)

    def frozen_seconds(self, agent: str) -> float:
        """Return for how long an agent's process, which is frozen now, has been so."""
        process = self._processes[agent]
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, f"{agent} is not frozen"
        return time.time() - (self._notes / str(process.pid)).stat().st_mtime

    async def _trainer(self) -> None:
        bus = self.bus("trainer-0")
        await Trainer(
            self.config,
            bus=bus,
            topology=self.topology,
            agent_id="trainer-0",
            learner=self._learner,
            channel=FakeChannel(),
            folder=self._folder,
        ).run()

    async def _keep(self, agent: str) -> None:
        """Start an agent, and again after each violent end."""
        role = agent.partition("-")[0]
        command = [sys.executable, "-m", "tests.chaos.victims", role, agent, str(self._folder / "config.json")]
        for _ in range(STARTS):
            environment = await self._environment(agent, role)
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=asyncio.subprocess.DEVNULL)
            self._processes[agent] = process
            code = await process.wait()
            if code == 0 or self._over:
                return
            note = self._notes / str(process.pid)
            where = note.read_text() if note.exists() else f"exit code {code}"
            self._doomed.discard(agent)
            self.deaths.append((agent, where))
            self.say(f"{agent} has died: {where}")
            self._changed.notify()
        raise AssertionError(f"{agent} was started {STARTS} times: {self.deaths[-5:]}; seed {self.seed}")

    async def _environment(self, agent: str, role: str) -> dict[str, str]:
        """Return what the next life of an agent is told, once it is time for it."""
        told = {
            PARENT_VARIABLE: str(os.getpid()),
            SEED_VARIABLE: f"{self.seed}/{agent}/{len(self.deaths)}",
            URL_VARIABLE: self._urls.get(agent, self._url),
            NOTES_VARIABLE: str(self._notes),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agents")]),
        }
        if agent in self._frozen:
            told |= {POINT_VARIABLE: self._frozen.pop(agent), SIGNAL_VARIABLE: str(int(signal.SIGSTOP))}
        elif self._points.get(agent):
            told[POINT_VARIABLE] = self._points[agent].pop(0)
            self._doomed.add(agent)
        else:
            await self.all_dead(role)
        return {**os.environ, **told}

    async def _stuck(self) -> str:
        """Return what is missing and who holds it up, as far as that can be learnt within a minute."""
        told = [f"not over in {self._limit:g} s; {len(self._learner.steps)} batches trained on; seed {self.seed}"]
        told += [
            f"{name}: {'runs' if one.returncode is None else one.returncode}" for name, one in self._processes.items()
        ]
        for ask in (self._missing, self.ask_broker):
            if ask is not None:
                try:
                    async with asyncio.timeout(30.0):
                        told.append(await ask())
                except Exception as error:
                    told.append(f"{ask.__name__} has failed: {error!r}")
        return "\n".join(told)

    async def _missing(self) -> str:
        _, counted = await self.record()
        missing = sorted({(batch, task) for batch, task, _ in self._wanted() - set(counted)})
        return f"not processed (batch, task): {missing}"

    async def _end(self) -> None:
        """See the others end by themselves; the one that was only just restarted has nobody to hear it from."""
        await asyncio.sleep(1.0)
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

    # -- what must hold

    def bus(self, name: str) -> Bus:
        """Return a connection of the test's own."""
        broker = self.config.broker.model_copy(update={"url": self._url})
        return create_bus(broker, self.topology, name)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Bus]:
        """Connect to the broker."""
        bus = self.bus("test")
        await bus.connect()
        try:
            yield bus
        finally:
            await bus.close()

    async def record(self) -> tuple[Record, Counter[Id]]:
        """Read what is on the streams, and count how often each run is in the sets that decide the tickets."""
        async with self.connected() as bus:
            record = await read_record(bus, self.topology)
        runs = [run for one in record.deciding.values() for run in one.runs]
        return record, Counter((int(batch), int(task), run) for batch, task, run, _ in runs)

    async def check(self) -> None:
        """Every run of every task is in the processed batches once, and was trained on once."""
        record, counted = await self.record()
        self._compare("processed", counted)
        for verdict in (one_outcome(record, Expected(tasks=TASKS)), trained_once(record), streams_decode(record)):
            assert verdict.result == "holds", f"{verdict}; seed {self.seed}"
        decided = {ticket: one.ready for ticket, one in record.deciding.items()}
        assert {ready.state for ready in decided.values()} == {"ready"}, decided
        assert sorted(int(ready.batch) for ready in decided.values()) == list(range(1, BATCHES + 1)), self.seed
        history = lineage(self._folder / "history", 1, BATCHES)
        uids = [uid for entry in history for uid in entry["uids"]]
        trained = Counter((int(one), int(two), int(three)) for one, two, three, *_ in (u.split("/") for u in uids))
        self._compare("trained on", trained)
        assert len(uids) == len(set(uids)) == BATCHES * TASKS * RUNS
        self.say(f"{BATCHES * TASKS} tasks, {len(uids)} runs, each exactly once; {len(self.deaths)} deaths")

    def _wanted(self) -> set[Id]:
        return {(batch, task, run) for batch in range(1, BATCHES + 1) for task in range(TASKS) for run in range(RUNS)}

    def _compare(self, what: str, counted: Counter[Id]) -> None:
        wanted = self._wanted()
        missing, double = sorted(wanted - set(counted)), sorted(one for one, times in counted.items() if times > 1)
        assert not missing, f"not {what} (batch, task, run): {missing}; double: {double}; seed {self.seed}"
        assert not double, f"{what} more than once (batch, task, run): {double}; seed {self.seed}"
        assert set(counted) == wanted, f"{what}, though in no batch: {sorted(set(counted) - wanted)}"
