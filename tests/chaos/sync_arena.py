"""Weight sync on a real broker between real processes, some of which die; the test asks the engines meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from tests.chaos.sync_victims import ENGINE_POINTS_VARIABLE, LEASE
from tests.chaos.victims import NOTES_VARIABLE, POINT_VARIABLE
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import load_config
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.messages import Heartbeat, SyncEvent, decode_any
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE

ROOT = Path(__file__).parents[2]
BUCKETS = 4
"""Of the tiny model, about."""
PATIENCE = LEASE + 10.0
"""Seconds after a death in which those that live must have gone on."""
HOSTS = ("host-0", "host-1")
ENGINES = ("host-0-engine", "host-1-engine")
SAMPLE = 40


def _numbered(point: str) -> str:
    return f"{point}:{2 * BUCKETS + 2}" if point == "broadcast" else point


@dataclass(frozen=True)
class Answer:
    """What an engine answered, and by which weights it says it did: the first token of each, generation and step."""

    engine: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int]]

    @property
    def first(self) -> tuple[int, int]:
        """The weights that it began with."""
        return self.versions[0][1:]

    @property
    def length(self) -> int:
        """Tokens by those."""
        return self.versions[1][0] if len(self.versions) > 1 else len(self.tokens)


class SyncArena:
    """One run of a trainer and two hosts, each with an engine.

    Args:
        folder: Of the run.
        url: The broker's.
        name: Of the run on the broker.
        points: By the id of an agent or engine, where each of its lives ends; after these it lives on.
        method: How weights travel.
        pause_mode: What becomes of requests in flight.
        max_tokens: Of the completions that engines are asked for.
        urls: By agent id, another way to the broker.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        name: str,
        *,
        points: dict[str, list[str]] | None = None,
        method: str = "collective",
        pause_mode: str = "wait",
        max_tokens: int = 8,
        urls: dict[str, str] | None = None,
    ) -> None:
        self.config = load_config(
            {
                "name": name,
                "run_dir": str(folder),
                "model": {"tiny": {}, "max_model_len": 64, "max_prompt_tokens": 8, "max_response_tokens": 56},
                "explorer": {"rollout_model": {"num_threads": 1, "lease": 20.0}},
                "synchronizer": {
                    "sync_method": method,
                    "pause_mode": pause_mode,
                    "sync_timeout": 5.0,
                    "bucket_bytes": 131072,
                },
                "monitor": {"tensorboard": False},
            }
        )
        self.folder, self._url, self._urls = folder, url, urls or {}
        self.topology = Topology(name)
        self._max_tokens = max_tokens
        self._victims = {end.partition(":")[0]: agent for agent, ends in (points or {}).items() for end in ends}
        self._points = {agent: [_numbered(end) for end in ends] for agent, ends in (points or {}).items()}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._notes = folder / "deaths"
        self._began = time.monotonic()
        self.changed = Notifier()
        self.events: list[tuple[float, SyncEvent]] = []
        self.beats: dict[str, tuple[float, Heartbeat]] = {}
        self.answers: list[Answer] = []
        self.deaths: list[tuple[str, str, float]] = []
        """Who died, where, and when; engines by their notes."""

    @property
    def now(self) -> float:
        """Seconds since the test began."""
        return time.monotonic() - self._began

    def say(self, act: str) -> None:
        """Print a line that a person can follow."""
        sys.stdout.write(f"[{self.now:6.2f} s] {act}\n")
        sys.stdout.flush()

    # -- the run

    async def play(self, acts: Callable[[], Awaitable[None]], seconds: float = 420.0) -> None:
        """Run everything while ``acts`` is done, then end it and look at what was answered."""
        self._notes.mkdir(parents=True)
        (self.folder / "config.json").write_text(self.config.model_dump_json())
        bus = create_bus(self.config.broker.model_copy(update={"url": self._url}), self.topology, "tap")
        await bus.connect()
        try:
            await bus.declare(*self.topology.durable)
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(self._tap(bus, *where))
                    for where in (("sync", "weights.#"), ("telemetry", "beat.#"))
                ]
                beside += [group.create_task(self._keep(agent)) for agent in ("trainer-0", *HOSTS)]
                beside += [group.create_task(self._ask(engine)) for engine in ENGINES]
                await acts()
                for task in beside:
                    task.cancel()
        finally:
            await self._end()
            await bus.close()
        await asyncio.to_thread(self._check_answers)

    async def _tap(self, bus: Bus, exchange: str, key: str) -> None:
        ears = self.topology.listener("tap", exchange, exchange, key)
        await bus.declare(ears)
        async with await bus.consume(ears) as feed:
            async for delivery in feed:
                message = decode_any(delivery.body, delivery.content_type)
                if isinstance(message, SyncEvent):
                    self.events.append((self.now, message))
                elif isinstance(message, Heartbeat):
                    self.beats[message.id] = (self.now, message)
                await delivery.ack()
                self.changed.notify()

    async def _keep(self, agent: str) -> None:
        """Start an agent, and again after each death."""
        role = "trainer" if agent.startswith("trainer") else "engine-host"
        command = [sys.executable, "-m", "tests.chaos.sync_victims", role, agent, str(self.folder / "config.json")]
        while True:
            told = {
                PARENT_VARIABLE: str(os.getpid()),
                URL_VARIABLE: self._urls.get(agent, self._url),
                NOTES_VARIABLE: str(self._notes),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agents")]),
            }
            if points := self._points.get(agent):
                told[POINT_VARIABLE] = points.pop(0)
            if points := self._points.get(f"{agent}-engine"):
                told[ENGINE_POINTS_VARIABLE] = ",".join(points)
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **told},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
            )
            self._processes[agent] = process
            code = await process.wait()
            note = self._notes / str(process.pid)
            self._died(agent, note.read_text() if note.exists() else f"exit code {code}")

    def _died(self, who: str, where: str) -> None:
        self.deaths.append((who, where, self.now))
        self.say(f"{who} has died: {where}")
        self.changed.notify()

    async def _ask(self, engine: str) -> None:
        """Ask an engine for completions as long as the test lasts; what it does not answer is nothing to look at."""
        body = {"prompt": [3, 4, 5], "max_tokens": self._max_tokens, "n": 2, "return_token_ids": True}
        limit = aiohttp.ClientTimeout(total=20.0)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while True:
                _, beat = self.beats.get(engine, (0.0, None))
                url = beat.detail.url if beat is not None else None
                if url:
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        async with session.post(f"{url}/v1/completions", json=body) as response:
                            if response.status == 200:
                                self._note_answer(engine, await response.json())
                await asyncio.sleep(0.2)

    def _note_answer(self, engine: str, answer: Any) -> None:
        for choice in answer["choices"]:
            versions = [(first, generation, step) for first, generation, step in choice["weight_versions"]]
            assert versions[0][0] == 0
            assert versions == sorted(versions), "later tokens by newer weights"
            self.answers.append(Answer(engine, choice["token_ids"], choice["token_logprobs"], versions))

    async def _end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for engine in ENGINES:
            ready = ReadyFile.read(self.folder / "engines" / f"{engine}.ready.json")
            if ready is not None and ready.lives():
                os.kill(ready.pid, signal.SIGKILL)

    # -- what is waited for

    def commits(self, since: float = 0.0) -> list[tuple[float, SyncEvent]]:
        """Return the versions committed at all since then."""
        return [(at, event) for at, event in self.events if event.verb == "commit" and event.epoch and at > since]

    async def commit_of(self, members: Sequence[str], since: float) -> float:
        """Return when a version was first committed at all of ``members`` after ``since``."""
        found: list[float] = []

        def there() -> bool:
            found[:] = [at for at, event in self.commits(since) if set(members) <= set(event.members)]
            return bool(found)

        await self.changed.until(there)
        return found[0]

    async def led_again(self, since: float) -> float:
        """Return when the trainer's next life offered its first version: how long a process takes to start, and to load
        a model, is not the gate's.
        """

        def offers() -> list[float]:
            return [at for at, event in self.events if event.verb == "prepare" and not event.pull and at > since]

        await self.changed.until(lambda: bool(offers()))
        return offers()[0]

    async def both_in(self) -> None:
        """Return once two more versions have been committed at both engines."""
        since = self.now
        for _ in range(2):
            since = await self.commit_of(ENGINES, since)

    async def death(self, number: int) -> tuple[str, str, float]:
        """Return the death with this number, from 0; those of engines are found by their notes."""

        def known() -> bool:
            told = {where for _, where, _ in self.deaths}
            for note in self._notes.iterdir():
                where = note.read_text()
                victim = self._victims.get(where)  # None: half a note
                if victim in ENGINES and where not in told:
                    self._died(victim, where)
            return len(self.deaths) > number

        await self.changed.until(known)
        return self.deaths[number]

    # -- what must hold

    def check_order(self) -> None:
        """Committed versions only rise, in every life of the trainer."""
        versions = [event.version for _, event in self.commits() if event.version is not None]
        assert versions == sorted(set(versions)), versions

    def _check_answers(self) -> None:
        """Each answer is by the weights of the version it names: their logprobs are recomputed. What is behind a change
        is left out: it still reads from a cache that the weights before made.
        """
        folder = ensure_model_folder(self.config.model, self.config.path / "model", self.config.seed)
        generator = TextGenerator.build(self.config.model, folder, num_threads=1)
        assert self.answers
        chosen = self.answers[:: max(1, len(self.answers) // SAMPLE)]
        loaded: tuple[int, int] | None = None
        for answer in sorted(chosen, key=lambda one: one.first):
            if answer.first != loaded:
                path = self.folder / "kept" / f"{answer.first[0]}.{answer.first[1]}.safetensors"
                generator.apply(generator.check(load_file(path)))
                loaded = answer.first
            scores = generator.score([ScoreRequest([3, 4, 5, *answer.tokens[: answer.length]])])[0][2:]
            worst = float((torch.tensor(scores) - torch.tensor(answer.logprobs[: answer.length])).abs().max())
            assert worst < 1e-4, f"{answer.engine} did not answer by {answer.first}: logprobs differ by {worst}"
        versions = len({answer.first for answer in chosen})
        self.say(f"{len(self.answers)} answers, {len(chosen)} of {versions} versions looked at")
        (self.folder / "summary.json").write_text(json.dumps({"deaths": self.deaths, "answers": len(self.answers)}))
