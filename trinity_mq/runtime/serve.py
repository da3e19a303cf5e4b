"""Runs a daemon from its configuration: logging, bus, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable

import structlog

from trinity_mq.bus import AddressError, Bus, BusRefused, BusUnavailable, StreamCut, Topology, create_bus
from trinity_mq.config import Config
from trinity_mq.messages import Role
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import EXIT_FATAL, EXIT_RECYCLE, EXIT_RESTART, FatalError, RecycleMe, RestartMe
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.runtime.process import die_with_parent
from trinity_mq.runtime.service import LifeSigns
from trinity_mq.runtime.supervisor import PARENT_VARIABLE
from trinity_mq.telemetry import setup_logging

log = structlog.get_logger(__name__)


GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the cycle collector in processes with many long-lived small objects: with the default ones a scheduler
with 10,000 tasks in flight spends a quarter of its time in the collector."""


def collect_seldom() -> None:
    """Exempt the objects that exist now from the cycle collector, and run it less often."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_daemon(config: Config, agent_id: str, role: Role, build: Callable[[Bus, Topology], Agent]) -> int:
    """Run the agent that ``build`` makes until its work is over or it was asked to drain.

    Returns:
        0 when done; ``EXIT_FATAL`` when a restart would fail the same way; ``EXIT_RESTART`` when a fresh process can go
        on, ``EXIT_RECYCLE`` when one should; 1 for an unexpected error (its traceback is in the log).
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent:
        die_with_parent(int(parent))
    setup_logging(role, agent_id, config.path, config.monitor.log_level)
    signs = LifeSigns.from_environment(supervised=bool(parent))  # before anything is started that could inherit it
    try:
        add_plugins(config.plugin_dirs)
        if role in {"explorer", "runner"}:
            collect_seldom()
        with signs.ended():
            asyncio.run(_serve(config, agent_id, build, signs))
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        cause = first_leaf(error)
        if isinstance(cause, FatalError | AddressError | BusRefused | StreamCut):
            return _end(agent_id, cause, EXIT_FATAL)
        if isinstance(cause, RecycleMe):
            log.info("agent_recycled", agent=agent_id, reason=str(cause))
            return EXIT_RECYCLE
        if isinstance(cause, RestartMe | BusUnavailable):
            return _end(agent_id, cause, EXIT_RESTART)
        if not isinstance(cause, Exception):
            raise
        log.exception("agent_failed", agent=agent_id)
        return _end(agent_id, cause, 1)
    return 0


def _end(agent_id: str, error: BaseException, code: int) -> int:
    named = str(error) if code != 1 else f"{type(error).__name__}: {error}"
    # also the one line on stderr, which its supervisor shows
    log.error("agent_ends", agent=agent_id, reason=named, code=code)
    return code


def first_leaf(error: BaseException) -> BaseException:
    """Return the first exception that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(config: Config, agent_id: str, build: Callable[[Bus, Topology], Agent], signs: LifeSigns) -> None:
    topology = Topology.of(config)
    agent = build(create_bus(config.broker, topology, agent_id), topology)
    if agent.role != "explorer":  # the explorer tells agents that cannot see the folder
        agent.run_folder = config.path
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.drain)
    log.info("agent_starts", agent=agent_id, pid=os.getpid(), incarnation=agent.incarnation)
    await agent.with_background(agent.run(), signs.report(agent))
    log.info("agent_done", agent=agent_id)
