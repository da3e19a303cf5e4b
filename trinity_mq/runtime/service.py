"""Liveness reports from an agent's event loop, for a service manager and for a container's health check.

The datagrams of sd_notify(3) are sent from here, since the packages for them are unmaintained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trinity_mq.telemetry import mask_passwords

if TYPE_CHECKING:
    from trinity_mq.runtime.agent import Agent

log = structlog.get_logger(__name__)

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
        """Send assignments such as ``READY=1``; return False if the manager accepts none at the moment."""
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
    """A file with one line of JSON: the agent, the time and its state."""

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
        """Return the reports that the environment requests, and remove the request, so that children do not report for
        us.

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
        """Report the end on exit."""
        try:
            yield
        finally:
            if self._health is not None:
                self._health.remove()
            if self._manager is not None and "STOPPING=1" not in self._sent:
                self._manager.send("STOPPING=1")

    async def report(self, agent: Agent) -> None:
        """Report until cancelled: at each interval, and at once when ``agent`` is ready or starts to drain."""
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
    """Return the seconds of the watchdog; None without a watchdog or if it watches another process."""
    if not microseconds or (pid and pid != str(os.getpid())):
        return None
    if not microseconds.isdecimal() or int(microseconds) == 0:
        log.warning("watchdog_unusable", variable=WATCHDOG_VARIABLE, seen=microseconds, wanted="microseconds above 0")
        return None
    return int(microseconds) / 1e6
