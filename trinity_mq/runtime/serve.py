"""Runs a daemon from its configuration: logging, bus, signals, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable

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
    first_leaf,
)
from trinity_mq.runtime.event_loop import run_on_fast_loop
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.runtime.process import (
    call_when_parent_ends,
    die_with_parent,
    disk_full_message,
    trim_memory_periodically,
)
from trinity_mq.runtime.processes.chaos_points import marked
from trinity_mq.runtime.processes.supervisor import PARENT_VARIABLE
from trinity_mq.runtime.service import LivenessReporter
from trinity_mq.telemetry import setup_logging, start_trace

log = structlog.get_logger(__name__)


ORPHAN_LEASE = HEARTBEAT_LEASE
"""Maximum seconds for which an agent outlives its supervisor."""
ORPHAN_DRAIN_SHARE, ORPHAN_CANCEL_SHARE = 0.4, 0.7
"""Shares of :data:`ORPHAN_LEASE` after which work in hand is returned to the queue, and after which the agent is
cancelled."""
GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the cycle collector in processes with many long-lived small objects. With the default thresholds a
scheduler with 10,000 tasks in flight spends a quarter of its time in the collector."""


def tune_garbage_collection() -> None:
    """Exclude all existing objects from the cycle collector, and run it less often."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_daemon(config: Config, agent_id: str, role: Role, build: Callable[[Bus, Topology], Agent]) -> int:
    """Run the agent made by ``build`` until its work is done or it was asked to drain.

    Returns:
        0 when done; ``EXIT_FATAL`` if a restart would fail in the same way; ``EXIT_DISK_FULL`` if it would until there
            is space; ``EXIT_RESTART`` if a new process can continue; ``EXIT_RECYCLE`` if a new process should replace
            this one; 1 for an unexpected error (its traceback is in the log).
    """
    parent = int(os.environ.get(PARENT_VARIABLE) or 0) or None
    if parent is not None:
        die_with_parent(parent)
    setup_logging(
        role, agent_id, config.path, config.monitor.log_level, run=config.name, max_bytes=config.monitor.log_max_bytes
    )
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
        cause = first_leaf(error)
        if (full := disk_full_message(cause)) is not None:
            return _end(agent_id, cause if isinstance(cause, FatalError) else FatalError(full), EXIT_DISK_FULL)
        if isinstance(cause, FatalError | AddressError | BusRefused | StreamCut):
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


def _end(agent_id: str, error: BaseException, code: int) -> int:
    named = str(error) if code != 1 else describe_error(error)
    # this is also the line on stderr that its supervisor shows
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
    if agent.role != "explorer":  # the explorer itself tells agents that cannot see the folder
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
