"""The agents of one run as processes of several releases, each started with its own release's command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.processes import descendants
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import Config
from trinity_mq.messages import Heartbeat, TrainerStatus, Version, decode
from trinity_mq.runtime.errors import EXIT_FATAL
from trinity_mq.runtime.notify import Notifier

ROOT = Path(__file__).parents[2]
EXCHANGE_SECONDS = 240.0
"""Seconds from the start of a process to its work in the run, on a busy machine."""
DRAIN_SECONDS = 90.0


class Fleet:
    """Starts, watches and exchanges agents. Every act is printed with its time.

    Args:
        config: The run's configuration.
        file: The same as a YAML file.
        url: The broker's.
        pythons: The Python of each release, by version; that of this tree is the running one.
        own: Version of this tree.
    """

    def __init__(self, config: Config, file: Path, url: str, pythons: Mapping[str, Path], own: str) -> None:
        self.config, self._file, self._url, self._own = config, file, url, own
        self._pythons = {**pythons, own: Path(sys.executable)}
        self.topology = Topology(config.name)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.committed: list[Version] = []
        """Committed versions of the weights, in the order in which the trainers said them."""
        self._changed = Notifier()
        self._started = time.monotonic()

    def say(self, act: str) -> None:
        """Print a line that a person can follow."""
        sys.stdout.write(f"[{time.monotonic() - self._started:7.2f} s, {self.progress:3} batches] {act}\n")
        sys.stdout.flush()

    @property
    def progress(self) -> int:
        """Batches that were trained on, as the trainer says."""
        details = [beat.detail for beat in self.beats.values() if isinstance(beat.detail, TrainerStatus)]
        return max((one.progress for one in details if one.progress is not None), default=0)

    def environment(self, release: str) -> dict[str, str]:
        """Return the environment of processes of a release: no other one's code is found in it."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if release == self._own:
            kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "agents")])
        return {**kept, URL_VARIABLE: self._url}

    def command(self, release: str, *words: str) -> list[str]:
        """Return the ``trinity-mq`` command line of a release."""
        return [str(self._pythons[release]), "-m", "trinity_mq.cli.main", *words]

    async def start(self, agent: str, release: str) -> None:
        """Start an agent of a release, and return once it says that it works, or waits for work."""
        role = "explorer" if agent.startswith("engines") else agent.partition("-")[0]
        more = ["--engines-only"] if agent.startswith("engines") else []
        before = self.beats.get(agent)
        with (self._file.parent / f"{agent}.output").open("ab") as output:
            streams = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
            command = self.command(release, role, str(self._file), "--id", agent, *more)
            process = await asyncio.create_subprocess_exec(
                *command, env=self.environment(release), cwd=self._file.parent, **streams
            )
        self.processes[agent] = process

        def is_at_work() -> bool:
            beat = self.beats.get(agent)
            if process.returncode is not None:
                raise AssertionError(f"{agent} of {release} ended with {process.returncode}: {self.output(agent)}")
            is_new = beat is not None and (before is None or beat.incarnation != before.incarnation)
            return is_new and beat is not None and beat.state not in {"starting", "gone"}

        await self.until(is_at_work, EXCHANGE_SECONDS, f"{agent} of {release} to be at work")
        assert self.beats[agent].release == release
        foreign = [one.cmdline() for one in self._family(process.pid) if one.cmdline()[:1] != self.command(release)[:1]]
        assert not foreign, f"{agent} of {release} has started processes of another: {foreign}"
        self.say(f"{agent} of {release} works")

    def _family(self, pid: int) -> list[psutil.Process]:
        return [psutil.Process(pid), *(one for one, words in descendants(pid) if "trinity_mq" in " ".join(words))]

    async def stop(self, agent: str) -> None:
        """Ask an agent to drain, and see it end in good order."""
        process = self.processes.pop(agent)
        self.say(f"SIGTERM to {agent}")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DRAIN_SECONDS):
            code = await process.wait()
        assert code == 0, f"{agent} ended with {code}: {self.output(agent)}"

    async def exchange(self, agent: str, release: str) -> None:
        """Put an agent of another release in the place of one, and see the run go on."""
        await self.stop(agent)
        await self.start(agent, release)
        wanted = self.progress + 2
        await self.until(lambda: self.progress >= wanted, EXCHANGE_SECONDS, f"batch {wanted} to be trained on")

    async def refused(self, agent: str, release: str) -> str:
        """Start an agent that is to refuse its work, and return what it says."""
        with contextlib.suppress(AssertionError):
            await self.start(agent, release)
            raise RuntimeError(f"{agent} of {release} works, though it should refuse to")
        assert self.processes.pop(agent).returncode == EXIT_FATAL, self.output(agent)
        return self.output(agent)

    def output(self, agent: str) -> str:
        """Return the end of what an agent's processes have printed."""
        return (self._file.parent / f"{agent}.output").read_text(errors="replace")[-3000:]

    async def until(self, predicate: Callable[[], bool], seconds: float, what: str) -> None:
        """Return once ``predicate`` holds; it is asked at each heartbeat."""
        try:
            async with asyncio.timeout(seconds):
                while not predicate():
                    await self._changed.wait(1.0)
        except TimeoutError:
            states = {name: (one.state, one.waits_for) for name, one in self.beats.items()}
            raise AssertionError(f"waited {seconds:g} s for {what}; {states}") from None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Bus]:
        """Listen to the run; at the end nothing of it is left running."""
        bus = create_bus(self.config.broker.model_copy(update={"url": self._url}), self.topology, "test")
        await bus.connect()
        listener = self.topology.listener("test", "upgrade", "telemetry", "beat.#")
        await bus.declare(*self.topology.durable, listener)
        try:
            async with await bus.consume(listener) as feed:
                listening = asyncio.create_task(self._listen(feed))
                try:
                    yield bus
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        finally:
            for process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await bus.close()

    async def _listen(self, feed: object) -> None:
        async for delivery in feed:  # type: ignore[attr-defined]
            beat = decode(delivery.body, Heartbeat)
            self.beats[beat.id] = beat
            committed = beat.detail.committed if isinstance(beat.detail, TrainerStatus) else None
            if committed is not None and committed not in self.committed[-1:]:
                self.committed.append(committed)
            await delivery.ack()
            self._changed.notify()
