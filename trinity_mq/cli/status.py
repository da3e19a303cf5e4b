"""``trinity-mq status``: shows the agents and queue depths of a live run, or the report of a stopped run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.observability.follow import QUEUES, depths, follow_telemetry
from trinity_mq.observability.report.text import make_report
from trinity_mq.observability.run_state import RunState
from trinity_mq.targets.connection import Target, connect_bus, find_target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import select_newest_run
from trinity_mq.terminal import open_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq status``."""
    add_target(parser, "(default: the newest run)", optional=True)
    add_broker(parser)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to listen (default: 3)")


def status(arguments: argparse.Namespace) -> int:
    """Listen to a run for some seconds and print a table, or print the report of a run that does not run now. Return 1
    if no agent sent a heartbeat, or if the stopped run has not finished, else 0.
    """
    select_newest_run(arguments)
    target = find_target(arguments, folder_suffices=True)
    folder = target.folder
    if folder is not None and folder.holder() is None and (folder.finished or target.broker.url is None):
        return _report(target.run, folder)
    from trinity_mq.observability.display import render_table

    state, now = asyncio.run(_look(target, arguments.seconds))
    open_console().print(render_table(state, now))
    if not state.agents(now):
        print(f"no agent of run {target.run!r} sent a heartbeat within {arguments.seconds:g} s", file=sys.stderr)
        return 1
    return 0


def _report(run: str, folder: RunFolder) -> int:
    """Print the report of a run without living agents. Return 0, or 1 if it has not finished."""
    print(make_report(run, folder.path))
    if folder.finished:
        print("this run has finished")
        return 0
    print(f"this run is stopped; `trinity-mq run {shlex.quote(str(folder.path))}` resumes it")
    return 1


async def _look(target: Target, seconds: float) -> tuple[RunState, float]:
    """Return (the state collected within ``seconds``, the end time on the event loop's clock)."""
    async with connect_bus(target.run, target.broker, "status") as (bus, topology):
        clock, state = asyncio.get_running_loop().time, RunState(target.run)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await follow_telemetry(bus, topology, "status", lambda message: state.receive(message, clock()))
        state.set_depths(await depths(bus, topology, QUEUES))
        return state, clock()
