"""Runs a daemon from its configuration: logging, bus, signals, liveness reports, and the exit code.

The liveness reports come from the agent's event loop. They serve a service manager, by the datagrams of sd_notify(3),
whose packages are unmaintained, and the health check of a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus import AddressError, Bus, BusRefused, BusUnavailable, StreamCut, Topology, create_bus
from trinity_mq.config import Config
from trinity_mq.roles import ROLES, Role
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.deliveries import CrashLog
from trinity_mq.runtime.errors import (
    EXIT_DISK_FULL,
    EXIT_FATAL,
    EXIT_RECYCLE,
    EXIT_RESTART,
    FatalError,
    RecycleRequested,
    RestartRequested,
    describe_error,
)
from trinity_mq.runtime.event_loop import run_on_fast_loop
from trinity_mq.runtime.expected_errors import leaf_errors
from trinity_mq.runtime.gpus import visible_devices
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.runtime.process import (
    call_when_parent_ends,
    die_with_parent,
    disk_full_message,
    trim_memory_periodically,
)
from trinity_mq.runtime.processes.chaos_points import marked
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE
from trinity_mq.telemetry import mask_passwords, setup_logging, start_trace

if TYPE_CHECKING:
    from trinity_mq.runtime.agent import Agent


log = structlog.get_logger(__name__)


ORPHAN_LEASE = HEARTBEAT_LEASE
"""Maximum seconds for which an agent outlives its supervisor."""
ORPHAN_DRAIN_SHARE, ORPHAN_CANCEL_SHARE = 0.4, 0.7
"""Shares of :data:`ORPHAN_LEASE` after which work in hand is returned to the queue, and after which the agent is
cancelled."""
GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the cycle collector in processes with many long-lived small objects. With the default thresholds a
scheduler with 10,000 tasks in flight spends a quarter of its time in the collector."""

HEALTH_VARIABLE = "TRINITY_MQ_HEALTH_FILE"
"""Environment variable with the file, on a local disk, that an agent rewrites; ``trinity-mq health`` reads it."""
NOTIFY_VARIABLE, WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
INTERVAL = 5.0
"""Maximum seconds between two reports; shorter if a watchdog requires it."""
EXTENSION = 30.0
"""Seconds of additional time that a starting or draining agent requests with each report."""
LONGEST_DRAIN = 900.0
"""Seconds of draining after which no more time is requested."""
LONGEST_STATUS = 200


def tune_garbage_collection() -> None:
    """Exclude all existing objects from the cycle collector, and run it less often."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_daemon(config: Config, agent_id: str, role: Role, build: Callable[[Bus, Topology], Agent]) -> int:
    """Run the agent made by ``build`` until its work is done or it was asked to drain.

    Returns:
        0 when done; ``EXIT_FATAL`` if a restart would fail in the same way; ``EXIT_DISK_FULL`` if the disk is full;
            ``EXIT_RESTART`` if a new process can continue; ``EXIT_RECYCLE`` if a new process should replace this one; 1
            for an unexpected error (its traceback is in the log); 130 if interrupted by Ctrl-C before or after the
            agent's own handling of signals. Of several errors, an error that a restart does not help decides, else the
            first error.
    """
    parent = int(os.environ.get(PARENT_VARIABLE) or 0) or None
    if parent is not None:
        die_with_parent(parent)
    setup_logging(
        role, agent_id, config.path, config.monitor.log_level, run=config.name, max_bytes=config.monitor.log_max_bytes
    )
    log.info("process_starts", devices=visible_devices())
    monitor = config.monitor
    start_trace(role, agent_id, config.path, on=monitor.traced, sample=monitor.sample, exported_only=not monitor.trace)
    supervised = parent is not None
    # before any child is started that could inherit the request
    signs = LivenessReporter.from_environment(supervised=supervised)
    try:
        add_plugins(config.plugin_dirs)
        if ROLES[role].allocates_much:
            tune_garbage_collection()
        with signs.ended():
            run_on_fast_loop(_serve(config, agent_id, build, signs, parent))
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        leaves = list(leaf_errors(error))
        cause = next(filter(_is_permanent, leaves), leaves[0])
        if cause is not leaves[0]:  # the log keeps the traceback of the other errors
            log.exception("agent_failed", agent=agent_id)
        if (full := disk_full_message(cause)) is not None:
            return _end(agent_id, cause if isinstance(cause, FatalError) else FatalError(full), EXIT_DISK_FULL)
        if _is_permanent(cause):
            return _end(agent_id, cause, EXIT_FATAL)
        if isinstance(cause, RecycleRequested):
            log.info("agent_recycled", agent=agent_id, reason=str(cause))
            return EXIT_RECYCLE
        if isinstance(cause, RestartRequested | BusUnavailable):
            return _end(agent_id, cause, EXIT_RESTART)
        if not isinstance(cause, Exception):
            raise
        log.exception("agent_failed", agent=agent_id)
        return _end(agent_id, cause, 1)
    return 0


def _is_permanent(error: BaseException) -> bool:
    """Return whether a restart would fail in the same way."""
    permanent = isinstance(error, FatalError | AddressError | BusRefused | StreamCut)
    return permanent or disk_full_message(error) is not None


def _end(agent_id: str, error: BaseException, code: int) -> int:
    named = str(error) if code != 1 else describe_error(error)
    # the supervisor shows this line, which also goes to stderr, as the reason
    log.error("agent_ends", agent=agent_id, reason=named, code=code)
    return code


async def _serve(
    config: Config,
    agent_id: str,
    build: Callable[[Bus, Topology], Agent],
    signs: LivenessReporter,
    parent: int | None,
) -> None:
    topology = Topology.of(config)
    agent = build(create_bus(config.broker, topology, agent_id), topology)
    agent.bus.notes = CrashLog(config.path / f"{agent_id}.in-hand.json")
    marked(agent.bus, agent.role, agent_id)
    if agent.role != "explorer":  # an explorer serves after the end too: it tells agents that cannot see the folder
        agent.run_folder = config.path
    loop = asyncio.get_running_loop()

    def drain() -> None:
        orphaned = parent is not None and os.getppid() != parent
        agent.drain(ORPHAN_DRAIN_SHARE * ORPHAN_LEASE if orphaned else None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    log.info("agent_starts", agent=agent_id, pid=os.getpid(), incarnation=agent.incarnation)
    try:
        async with asyncio.timeout(None) as until:
            if parent is not None:
                call_when_parent_ends(parent, functools.partial(_end_orphaned, loop, drain, until))
            background = [signs.report(agent)]
            if agent.role != "trainer":  # the trainer keeps freed memory for its next step
                background.append(trim_memory_periodically())
            await agent.run_with_background(agent.run(), *background)
    except TimeoutError:
        if not until.expired():
            raise
        raise RestartRequested("its supervisor is gone, and its work in hand took too long") from None
    log.info("agent_done", agent=agent_id)


def _end_orphaned(loop: asyncio.AbstractEventLoop, drain: Callable[[], None], until: asyncio.Timeout) -> None:
    """End this process within :data:`ORPHAN_LEASE`, in good order if possible, since a broker started by the supervisor
    is gone too. Called in a thread, which the event loop cannot block.
    """
    log.warning("supervisor_gone", seconds=ORPHAN_LEASE)

    def begin() -> None:
        drain()
        until.reschedule(loop.time() + ORPHAN_CANCEL_SHARE * ORPHAN_LEASE)

    with contextlib.suppress(RuntimeError):  # the loop has ended, so the process will end too
        loop.call_soon_threadsafe(begin)
    time.sleep(ORPHAN_LEASE)
    log.error("agent_killed", reason="its supervisor is gone, and it did not end in time")
    os._exit(EXIT_RESTART)


class ServiceManager:
    """The service manager that started this process.

    Args:
        address: Socket of the manager: a path, or ``@`` and an abstract name.
        watchdog: Seconds within which the manager expects each report; None: no watchdog.
    """

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        self.watchdog = watchdog
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._warned = False

    def send(self, *lines: str) -> bool:
        """Send assignments such as ``READY=1``; return False if they cannot be sent at the moment."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._warned:
                log.warning("service_manager_not_told", reason=str(error), lines=lines)
            self._warned = True
            return False
        self._warned = False
        return True


class HealthFile:
    """A file with one line of JSON: process id, agent id, loop time in seconds, whether the agent serves, its state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._warned = False
        self.remove()  # left by an earlier process

    def write(self, agent: Agent) -> None:
        """Write the file, as a sign that the event loop runs."""
        fields = {
            "pid": os.getpid(),
            "agent": agent.id,
            "clock": asyncio.get_running_loop().time(),
            "ready": agent.serving.is_set(),
            "state": status_of(agent),
        }
        try:
            self._part.write_text(json.dumps(fields) + "\n")
            self._part.replace(self._path)
        except OSError as error:
            if not self._warned:
                log.warning("health_file_not_written", path=str(self._path), reason=str(error))
            self._warned = True

    def remove(self) -> None:
        """Remove the file, since the agent no longer runs."""
        for path in (self._path, self._part):
            with contextlib.suppress(OSError):
                path.unlink()


class LivenessReporter:
    """Reports to a service manager and a health file while :meth:`report` runs."""

    def __init__(self, manager: ServiceManager | None = None, health: HealthFile | None = None) -> None:
        self._manager, self._health = manager, health
        watchdog = manager.watchdog if manager is not None else None
        self.interval = min(INTERVAL, watchdog / 2) if watchdog else INTERVAL
        self._sent: set[str] = set()
        self._status = ""
        self._drains_since: float | None = None

    @classmethod
    def from_environment(
        cls, environ: MutableMapping[str, str] = os.environ, *, supervised: bool = False
    ) -> LivenessReporter:
        """Return a reporter for the reports that the environment requests, and remove the request from the environment,
        so that children do not report for us. The reporter of a supervised agent reports nothing.

        Args:
            environ: The environment.
            supervised: Whether this agent has a supervisor, which reports instead.
        """
        address = environ.pop(NOTIFY_VARIABLE, "")
        watchdog = _watchdog(environ.pop(WATCHDOG_VARIABLE, ""), environ.pop(WATCHDOG_PID_VARIABLE, ""))
        health = environ.pop(HEALTH_VARIABLE, "")
        if supervised:
            return cls()
        if address and address[0] not in "/@":
            log.warning(
                "service_manager_unknown", variable=NOTIFY_VARIABLE, seen=address, wanted="a path, or @ and a name"
            )
            address = ""
        return cls(ServiceManager(address, watchdog) if address else None, HealthFile(Path(health)) if health else None)

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Report the end of the agent when the ``with`` block ends."""
        try:
            yield
        finally:
            if self._health is not None:
                self._health.remove()
            if self._manager is not None and "STOPPING=1" not in self._sent:
                self._manager.send("STOPPING=1")

    async def report(self, agent: Agent) -> None:
        """Report until cancelled: at each interval, and at once when ``agent`` is ready or starts to drain. Return at
        once if no reports are requested.
        """
        if self._manager is None and self._health is None:
            return
        async with asyncio.TaskGroup() as group:
            for event in (agent.serving, agent.draining):
                group.create_task(self._report_at(event, agent))
            while True:
                self._report(agent)
                await asyncio.sleep(self.interval)  # late when the loop is blocked, as intended

    async def _report_at(self, event: asyncio.Event, agent: Agent) -> None:
        await event.wait()
        self._report(agent)

    def _report(self, agent: Agent) -> None:
        if self._health is not None:
            self._health.write(agent)
        if self._manager is not None:
            self._report_to_manager(self._manager, agent)

    def _report_to_manager(self, manager: ServiceManager, agent: Agent) -> None:
        serving, draining = agent.serving.is_set(), agent.draining.is_set()
        transitions = {line for line, now in (("READY=1", serving), ("STOPPING=1", draining)) if now} - self._sent
        status = status_of(agent)
        lines = sorted(transitions)
        if status != self._status:
            lines.append(f"STATUS={status}")
        if manager.watchdog is not None:
            lines.append("WATCHDOG=1")
        if self._needs_more_time(serving, draining):
            lines.append(f"EXTEND_TIMEOUT_USEC={int((EXTENSION + self.interval) * 1e6)}")
        if lines and manager.send(*lines):
            self._sent |= transitions
            self._status = status

    def _needs_more_time(self, serving: bool, draining: bool) -> bool:
        """Return whether to request more time than the unit allows."""
        if not draining:
            return not serving
        now = asyncio.get_running_loop().time()
        if self._drains_since is None:
            self._drains_since = now
        return now - self._drains_since < LONGEST_DRAIN


def status_of(agent: Agent) -> str:
    """Return the agent's state, its awaited event and its broker's trouble, in one line for people."""
    if agent.bus.trouble is not None:
        waits = f"waits for the broker: {agent.bus.trouble}" if agent.serving.is_set() else "connects to the broker"
    else:
        waits = f"waits for {agent.waits_for}" if agent.waits_for else ""
    state = "draining" if agent.draining.is_set() and agent.state != "gone" else agent.state
    line = " ".join(mask_passwords("; ".join(part for part in (state, waits) if part)).split())
    return line if len(line) <= LONGEST_STATUS else f"{line[: LONGEST_STATUS - 1]}…"


def _watchdog(microseconds: str, pid: str) -> float | None:
    """Return the seconds of the watchdog; None without a watchdog, if it watches another process, or if the text is not
    a positive number.
    """
    if not microseconds or (pid and pid != str(os.getpid())):
        return None
    if not microseconds.isdecimal() or int(microseconds) == 0:
        log.warning("watchdog_unusable", variable=WATCHDOG_VARIABLE, seen=microseconds, wanted="microseconds above 0")
        return None
    return int(microseconds) / 1e6
