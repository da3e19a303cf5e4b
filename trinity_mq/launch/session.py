"""One run from start to end: broker, supervised agents, display, and the rules for ending the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.bus.addresses import URL_VARIABLE, Addresses
from trinity_mq.bus.retry import retrying
from trinity_mq.config import Config
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.host.ready_file import free_gpus
from trinity_mq.errors import CommandError
from trinity_mq.messages import ControlEvent
from trinity_mq.observability.diagnosis import Observation, diagnose
from trinity_mq.observability.display import Display
from trinity_mq.observability.follow import MetricsTail, consume_messages, depths, follow_telemetry
from trinity_mq.observability.run_state import STILL_SHOWN, RunState
from trinity_mq.observability.trackers.process import TrackerProcess
from trinity_mq.roles import RoleRow, row_of
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.placement import Placement, place_run
from trinity_mq.runtime.process import trim_memory_periodically
from trinity_mq.runtime.processes.fork_server_process import ForkServer
from trinity_mq.runtime.processes.forking import ADDRESS_VARIABLE, start_command, start_forked
from trinity_mq.runtime.processes.supervisor import ProcessEvent, ProcessSpec, Supervisor
from trinity_mq.targets.connection import connect_bus
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.probe import broker_problem
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.telemetry import get_logger

log = get_logger(__name__)

QUEUES = ("closed", "tasks.train", "tasks.eval", "dead")
REFRESH_SECONDS = 0.5
DEPTH_SECONDS = 2.0
FINAL_HEARTBEAT_SECONDS = 2.0
"""Seconds to wait for the last heartbeat of the leader after its process has ended."""
ENDED = ("finished", "stopped", "failed")
LOOK_SECONDS = 1.0
"""Seconds between two checks whether the tapped run keeps its broker running."""


class RunSession:
    """A run in progress.

    Args:
        config: Configuration of the run.
        folder: Locked run folder that contains the configuration.
        display: Shows progress.
        url: URL of an existing broker. None: start a private broker in the run's folder.
        fork_server: Forks the agents. None: each agent is started as a separate command.
        attached: If true, the end of standard input drains the run, because the process that started it has ended.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        display: Display,
        url: str | None,
        fork_server: ForkServer | None,
        *,
        attached: bool = False,
    ) -> None:
        self._attached = attached
        self._config, self._folder, self._display, self._url = config, folder, display, url
        self._fork_server = fork_server
        self._leader = config.leader
        """Name of the agent whose end is the end of the run."""
        addresses = Addresses.of(config.broker)
        self._url_from_file = url is not None and addresses is not None and addresses.from_file
        """True if the URL is read from a file at each connect. Agents then read the file too."""
        self.state = RunState(config.name, config=config)
        self.signal: signal.Signals | None = None
        """The first signal that requested a stop."""
        self.failures: list[ProcessEvent] = []
        """Permanent failures: processes that will not be restarted."""
        self.finished = False
        """True if the leader finished without having been drained, and no process failed."""
        self._metrics = MetricsTail(folder.path)
        for message in self._metrics.read():
            self.state.receive(message, 0.0)
        self.state.take_news()  # discard the news of an earlier start
        self.state.clear_momentary_metrics()
        self._supervisor: Supervisor | None = None
        self._trackers = TrackerProcess(config, folder, self.state.add_news)
        self._changed = Notifier()

    @property
    def started(self) -> bool:
        """True if the agents have been started."""
        return self._supervisor is not None

    @property
    def steps(self) -> int | None:
        """Number of train steps that changed the weights, over all starts of the run. None: not reported yet."""
        return self.state.train_steps

    async def run(self) -> None:
        """Run until the leader has finished, a process failed permanently, or a signal arrived."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, task)
        if self._attached:
            loop.add_reader(sys.stdin.fileno(), self._on_input, loop, task)
        broker_name = "a private RabbitMQ" if self._url is None else "the given broker"
        self.state.add_news(f"run {self._config.name!r} in {self._folder.path}, on {broker_name}")
        self._draw()
        try:
            async with self._broker() as url:
                self._folder.save_broker_url(url)
                broker = self._config.broker
                if not self._url_from_file:
                    broker = broker.model_copy(update={"url": url})
                await self._trackers.start()
                async with (
                    tapped_broker(self._config, self.state.add_news),
                    connect_bus(self._config.name, broker, "supervisor", self._add_news) as (bus, topology),
                ):
                    await self._tell_broker_trouble(bus, topology)
                    await self._supervise(bus, topology, url)
        except asyncio.CancelledError:
            if self.signal is None or task is None:
                raise
            task.uncancel()  # our own cancellation, for a signal before the agents were started
        finally:
            self._folder.remove_broker_url()
            await self._trackers.end()
            self._draw()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if self._attached:
                loop.remove_reader(sys.stdin.fileno())

    async def _tell_broker_trouble(self, bus: Bus, topology: Topology) -> None:
        """Before the agents start, report a broker that refuses messages. The agents wait until it accepts messages."""
        if trouble := await broker_problem(bus, topology):
            finding = diagnose(Observation(broker=trouble))
            self._add_news(f"{finding.sentence}; what to do: {finding.lever}")
        self.state.began = asyncio.get_running_loop().time()

    def _broker(self) -> contextlib.AbstractAsyncContextManager[str]:
        if self._url is not None:
            return contextlib.nullcontext(self._url)
        return private_broker(self._folder.broker, self._config.supervisor, self.state.add_news)

    async def _supervise(self, bus: Bus, topology: Topology, url: str) -> None:
        server = self._fork_server
        report = await asyncio.to_thread(free_gpus, self._folder.path)
        placement = place_run(self._config, report.gpus)
        if report.gpus:
            self._add_news(str(placement))
        agent_url = None if self._url_from_file else url
        self._supervisor = supervisor = Supervisor(
            agents(self._config, self._folder.config_file, agent_url, server, placement),
            config=self._config.supervisor,
            log_dir=self._folder.logs,
            on_event=self._on_event,
            start=start_command if server is None else start_forked(server),
        )
        async with asyncio.TaskGroup() as group:
            watching = [
                group.create_task(self._follow(bus, topology), name="follow"),
                group.create_task(self._depths(bus, topology), name="depths"),
                group.create_task(self._restart_on_request(bus, topology, supervisor, group), name="restart"),
                group.create_task(self._refresh_display(), name="draw"),
                group.create_task(self._end_run(supervisor), name="end"),
                group.create_task(trim_memory_periodically(), name="give back freed memory"),
            ]
            code = await group.create_task(supervisor.run(), name="supervise")
            if self.signal is None and supervisor.phases[self._leader] == "finished":
                # all processes may end before the last heartbeat of the leader has arrived
                self.finished = await self._leader_finished()
            self.finished = self.finished and code == 0
            for task in watching:
                task.cancel()

    async def _end_run(self, supervisor: Supervisor) -> None:
        await self._changed.until(lambda: self.signal is not None or supervisor.phases[self._leader] in ENDED)
        if self.signal is not None:
            # drain all agents together: the explorer starts no new work and keeps the engines up until the runners have
            # finished
            await supervisor.drain()
        elif supervisor.phases[self._leader] == "finished":
            self.finished = await self._leader_finished()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.supervisor.grace):
                    await self._changed.until(
                        lambda: self.signal is not None or all(phase in ENDED for phase in supervisor.phases.values())
                    )
            await supervisor.drain()

    async def _leader_finished(self) -> bool:
        """Return False if the leader's last heartbeat says that it was drained before the end of the run, else True."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_HEARTBEAT_SECONDS):
                await self._changed.until(lambda: self.state.final_state(self._leader) is not None)
        return self.state.final_state(self._leader) != "gone"

    async def _follow(self, bus: Bus, topology: Topology) -> None:
        async for attempt in retrying(BusUnavailable):
            with attempt:
                # metrics come from their file, which also contains the metrics from before a restart
                await follow_telemetry(bus, topology, "supervisor", self._receive, pattern="beat.#")

    def _receive(self, message: object) -> None:
        self.state.receive(message, asyncio.get_running_loop().time())
        self._changed.notify()

    async def _depths(self, bus: Bus, topology: Topology) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self.state.set_depths(await depths(bus, topology, QUEUES), clock())
            is_still = self.state.still(clock()) >= STILL_SHOWN
            self.state.broker_trouble = await broker_problem(bus, topology) if is_still else ""
            if self.signal is None:
                self.state.diagnose_stall(clock())
            await asyncio.sleep(DEPTH_SECONDS)

    async def _restart_on_request(
        self, bus: Bus, topology: Topology, supervisor: Supervisor, group: asyncio.TaskGroup
    ) -> None:
        """Restart agents on request. The supervisor handles the request because a hanging agent cannot."""
        queue = topology.listener("supervisor", uuid.uuid4().hex[:12], "control", "restart.#")

        def receive(event: object) -> None:
            if isinstance(event, ControlEvent) and event.verb == "restart" and event.target in supervisor.phases:
                self.state.add_news(f"{event.target} is replaced: {event.reason or 'asked for'}")
                group.create_task(supervisor.restart(event.target))

        async for attempt in retrying(BusUnavailable):
            with attempt:
                await consume_messages(bus, queue, receive)

    async def _refresh_display(self) -> None:
        while True:
            self._draw()
            await asyncio.sleep(REFRESH_SECONDS)

    def _add_news(self, text: str) -> None:
        self.state.add_news(text)
        self._draw()

    def _draw(self) -> None:
        now = asyncio.get_running_loop().time()
        for message in self._metrics.read():
            self.state.receive(message, now)
        self._display.show(self.state, self.state.take_news(), now)

    def _on_event(self, event: ProcessEvent) -> None:
        level = log.warning if event.what in {"died", "failed", "killed"} else log.info
        level("process", name=event.name, what=event.what, pid=event.pid, code=event.code, reason=event.reason)
        if event.what == "failed":
            self.failures.append(event)
        self.state.add_event(event)
        self._changed.notify()

    def _on_input(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[int] | None) -> None:
        if os.read(sys.stdin.fileno(), 4096) == b"":
            loop.remove_reader(sys.stdin.fileno())
            self._on_signal(signal.SIGTERM, main)

    def _on_signal(self, number: signal.Signals, main: asyncio.Task[int] | None) -> None:
        if self.signal is not None:
            self.state.add_news("killed at once")
            self._trackers.kill()
            if self._supervisor is not None:
                self._supervisor.kill()
            return
        self.signal = number
        if self._supervisor is None:
            if main is not None:
                main.cancel()
            return
        self.state.add_news("draining; interrupt again to kill at once")
        self._changed.notify()


def agents(
    config: Config,
    config_file: Path,
    url: str | None,
    fork_server: ForkServer | None = None,
    placement: Placement | None = None,
) -> list[ProcessSpec]:
    """Return the processes of a run, each with its GPUs by ``placement``. Without ``url`` the processes find the
    broker's address themselves: in the configuration, the environment or a file that they name.
    """
    forking = {} if fork_server is None else {ADDRESS_VARIABLE: str(fork_server.path)}
    return [
        ProcessSpec(
            name=f"{role}-{n}",
            role=role,
            argv=(sys.executable, "-m", "trinity_mq.cli.main", role, str(config_file), "--id", f"{role}-{n}"),
            env={
                **forking,
                **({} if placement is None else placement.agent_environment(f"{role}-{n}")),
                **_environment(config, row_of(role), url),
            },
            starts_anew=bool(_role_setting(config, row_of(role).env, {})),
        )
        for role, count in config.agent_counts.items()
        for n in range(count)
    ]


def _role_setting(config: Config, key: str, default: Any) -> Any:
    return attrgetter(key)(config) if key else default


def _environment(config: Config, row: RoleRow, url: str | None) -> Mapping[str, str]:
    count = str(cpu_threads(config, _role_setting(config, row.threads, 1)))
    return {
        **({} if url is None else {URL_VARIABLE: url}),
        # without these limits every process starts a thread per core, and the threads compete for the cores
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **_role_setting(config, row.env, {}),
    }


@contextlib.asynccontextmanager
async def tapped_broker(config: Config, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Keep the private broker of the run in ``source.tap`` running while that run does not run itself, so that its
    stream can be read to the end. Do nothing without ``source.tap``, or if the tapped run does not use a private
    broker.

    Args:
        config: Configuration of the training run.
        report: Called with a line of text for a person.

    Raises:
        FatalError: ``source.tap`` does not name a run.
        NodeError: The broker could not be started, or died too often.
    """
    folder = _folder(config)
    if folder is None:
        yield
        return
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(_keep(folder, config, report), name="keep the tapped broker")
        yield
        keeping.cancel()


def _folder(config: Config) -> RunFolder | None:
    """Return the folder of a tapped run with a private broker; None without such a run."""
    if config.mode != "train" or not config.source.tap:
        return None
    from trinity_agents.trainer.sources.tapped_run import TappedRun

    run = TappedRun.of(config)
    if run.config is None or run.url_file is None:
        return None
    return RunFolder(run.config.model_copy(update={"run_dir": str(run.url_file.parent)}))


async def _keep(folder: RunFolder, config: Config, report: Callable[[str], None]) -> None:
    while True:
        if folder.holder() is None:
            with contextlib.suppress(CommandError):  # another process took the folder first
                await _serve(folder, config, report)
        await asyncio.sleep(LOOK_SECONDS)


async def _serve(folder: RunFolder, config: Config, report: Callable[[str], None]) -> None:
    """Run the broker until cancelled.

    Raises:
        CommandError: Another process works in the folder.
    """
    with folder.locked():
        report(f"starting the private broker of run {folder.name!r}, which is stopped")
        async with private_broker(folder.broker, config.supervisor, report) as url:
            folder.save_broker_url(url)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                folder.remove_broker_url()
