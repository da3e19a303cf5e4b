"""The processes of a run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from trinity_mq.engines.host.ready_file import ReadyFile
from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.targets.base import Victim, VictimGoneError
from trinity_mq.roles import COMMAND_ROLES
from trinity_mq.testing.tcp_proxy import FaultProxy

MARK_VARIABLE = "TRINITY_MQ_CHAOS_MARK"
"""Environment variable of every process of a run that ``trinity-mq chaos`` started."""
AGENT = re.compile(r"\btrinity_mq\.cli\.main (explorer|runner|operator|trainer|gateway) .*--id (\S+)")
ENDING_SECONDS, LOOK_SECONDS = 15.0, 0.2
"""Seconds that processes may take to end after their run, and seconds between two checks."""
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "restart": signal.SIGTERM}


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot. Together with the pid it identifies the process.
    None: the process has ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(") ")[2].split()
    return None if state in "ZX" else int(fields[18])


class LocalTargets:
    """Finds the processes of a run on this machine, under one ``trinity-mq run``, and injects faults into them.

    Args:
        run_dir: The run's folder.
        supervisor: Process id of ``trinity-mq run``.
        restart: Asks the supervisor for a new process of an agent, by the agent's id.
        mark: Value of :data:`MARK_VARIABLE` in the environment of the run's processes; None: the run was started
            without a mark.
        proxy: Proxy between agents and broker. None: connections cannot be cut.
        broker_parent: Id of the process that started the private broker. None: the broker's process gets no faults;
            only connections through ``proxy`` are cut.

    Raises:
        CommandError: The system is not Linux, so processes cannot be identified safely.
    """

    is_local = True

    def __init__(
        self,
        run_dir: Path,
        supervisor: int,
        *,
        restart: Callable[[str], Awaitable[None]],
        mark: str | None = None,
        proxy: FaultProxy | None = None,
        broker_parent: int | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise CommandError("trinity-mq chaos signals local processes on Linux only; see --compose and --kubernetes")
        self.where = f"processes of {run_dir}"
        self._run_dir, self._restart, self._mark, self._proxy = run_dir, restart, mark, proxy
        self._supervisor, self._supervisor_start = supervisor, start_ticks(supervisor)
        self._broker_parent = broker_parent
        self._cut_off: set[int] = set()
        """Process ids whose new connections are refused."""
        if proxy is not None:
            proxy.refuses = self._is_cut_off
        self._start_by_pid: dict[int, int] = {}
        """Start times by process id, of all processes found so far."""

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """Possible kinds of faults by role."""
        cut = ("cut",) if self._proxy is not None else ()
        agent = ("kill", "freeze", *cut, "restart")
        agents = dict.fromkeys(COMMAND_ROLES, agent)
        return {
            **agents,
            "engine": ("kill", "freeze", "restart"),
            "broker": cut if self._broker_parent is None else agent,
        }

    async def find(self, role: str) -> list[Victim]:
        """Return the living processes of a role, sorted by name. ``broker``: its process, or only the proxy."""
        self._note_all()
        if role == "broker":
            return list(self._broker())
        victims = self._engines() if role == "engine" else self._agents(role)
        return sorted(victims, key=lambda victim: victim.name)

    async def strike(self, victim: Victim, kind: str) -> None:
        """Inject a fault into a process after its verification, or into the proxy of the broker."""
        if victim.role == "broker" and kind == "cut":
            assert self._proxy is not None
            self._proxy.refuse()
        elif kind == "cut":
            self._cut(victim)
        elif kind == "restart" and victim.agent is not None and victim.role not in {"engine", "broker"}:
            self._verified(victim)  # a supervisor treats an exit after a plain SIGTERM as the end of the agent's work
            await self._restart(victim.agent)
        else:
            self._signal(victim, SIGNALS[kind])

    async def relieve(self, victim: Victim, kind: str) -> None:
        """Thaw a process, or accept its connections again."""
        if kind == "cut" and victim.role == "broker" and self._proxy is not None:
            self._proxy.accept()
        elif kind == "cut":
            self._cut_off.discard(_pid_of(victim))
        elif kind == "freeze":
            with contextlib.suppress(VictimGoneError):  # the process was already replaced
                self._signal(victim, signal.SIGCONT)

    async def left_over(self) -> list[str]:
        """Return the processes of the run that are still alive some seconds after its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                while self._living():  # noqa: ASYNC110  # they are nobody's children that could be waited for
                    await asyncio.sleep(LOOK_SECONDS)
        return [f"process {pid}: {_command(pid)}" for pid in sorted(self._living())]

    def end_left_over(self) -> None:
        """Kill the processes that :meth:`left_over` returns."""
        for pid in self._living():
            with contextlib.suppress(ProcessLookupError, VictimGoneError):
                fd = os.pidfd_open(pid)
                try:
                    if self._start_by_pid.get(pid) == start_ticks(pid) or self._is_marked(pid):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)

    # -- identification of the run's processes

    def _agents(self, role: str) -> Iterator[Victim]:
        config = str(self._run_dir / "config.yaml")
        for pid in self._tree():
            line = _command(pid)
            match = AGENT.search(line)
            # each agent leads its own session; its forked children have the same command line
            if match is not None and match[1] == role and config in line and _leads_session(pid):
                yield from self._victim(role, match[2], pid, match[2])

    def _engines(self) -> Iterator[Victim]:
        for path in (self._run_dir / "engines").glob("*.ready.json"):
            ready = ReadyFile.read(path)
            if ready is not None and ready.lives() and path.name in _command(ready.pid):
                yield from self._victim("engine", ready.id, ready.pid, ready.id)

    def _broker(self) -> Iterator[Victim]:
        if self._broker_parent is None:
            if self._proxy is not None:
                yield Victim("broker", "broker", "elsewhere")
            return
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid = int((self._run_dir / "broker" / "lock").read_text())
            if psutil.Process(pid).ppid() == self._broker_parent and "beam" in psutil.Process(pid).name():
                yield from self._victim("broker", "broker", pid, None)

    def _victim(self, role: str, name: str, pid: int, agent: str | None) -> Iterator[Victim]:
        if (start := start_ticks(pid)) is not None:
            yield Victim(role, name, f"{pid}@{start}", agent)

    def _signal(self, victim: Victim, number: signal.Signals) -> None:
        """Signal a process through a descriptor opened before the verification, so that a reused process id is safe."""
        pid = _pid_of(victim)
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise VictimGoneError(f"{victim.name} (process {pid}) has ended") from error
        try:
            self._verified(victim)
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError as error:
            raise VictimGoneError(f"{victim.name} (process {pid}) has ended") from error
        finally:
            os.close(fd)

    def _verified(self, victim: Victim) -> int:
        """Return the process id of a victim that is in the same life and belongs to the run.

        Raises:
            VictimGoneError: The victim has ended, or does not belong to the run.
        """
        pid, start = map(int, victim.identity.split("@"))
        if start_ticks(pid) != start:
            raise VictimGoneError(f"{victim.name} (process {pid}) has ended")
        if victim.role == "broker":
            is_of_run = any(victim.identity == candidate.identity for candidate in self._broker())
        elif victim.role == "engine":
            is_of_run = any(victim.identity == candidate.identity for candidate in self._engines())
        else:
            is_of_run = str(self._run_dir / "config.yaml") in _command(pid) and pid in self._tree()
        if not is_of_run:
            raise VictimGoneError(f"process {pid} is not {victim.name} of this run: nothing was done to it")
        return pid

    def _cut(self, victim: Victim) -> None:
        assert self._proxy is not None
        pid = self._verified(victim)
        self._cut_off.add(pid)
        self._proxy.cut_clients(self._ports(pid))

    def _is_cut_off(self, port: int) -> bool:
        """Return whether a client port of the proxy belongs to a disconnected process."""
        return any(port in self._ports(pid) for pid in self._cut_off)

    def _ports(self, pid: int) -> set[int]:
        """Return the local ports of a process that are connected to the proxy."""
        assert self._proxy is not None
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("tcp")
            return {
                connection.laddr.port
                for connection in connections
                if connection.raddr and connection.raddr.port == self._proxy.port
            }
        return set()

    def _tree(self) -> set[int]:
        """Return the descendants of the supervisor."""
        if start_ticks(self._supervisor) != self._supervisor_start:
            return set()
        with contextlib.suppress(psutil.Error):
            return {child.pid for child in psutil.Process(self._supervisor).children(recursive=True)}
        return set()

    def _note_all(self) -> None:
        for pid in self._tree():
            if (start := start_ticks(pid)) is not None:
                self._start_by_pid[pid] = start
        for victim in self._engines():
            pid, start = map(int, victim.identity.split("@"))
            self._start_by_pid[pid] = start

    def _living(self) -> set[int]:
        """Return the living processes of the run, whatever their current parent."""
        alive = {pid for pid, start in self._start_by_pid.items() if start_ticks(pid) == start}
        marked = {pid for pid in psutil.pids() if self._is_marked(pid) and start_ticks(pid) is not None}
        return alive | marked | ({self._supervisor} if self._supervisor_lives() else set())

    def _supervisor_lives(self) -> bool:
        return self._supervisor_start is not None and start_ticks(self._supervisor) == self._supervisor_start

    def _is_marked(self, pid: int) -> bool:
        if self._mark is None:
            return False
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK_VARIABLE}={self._mark}".encode() in words


def _pid_of(victim: Victim) -> int:
    return int(victim.identity.partition("@")[0])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
