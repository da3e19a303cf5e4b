"""``trinity-mq status``: the agents of a run, and the depths of its queues."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from trinity_mq.cli.arguments import add_run_or_config
from trinity_mq.cli.broker.connection import connected, target
from trinity_mq.cli.run.follow import depths, follow
from trinity_mq.cli.run.run_view import RunView
from trinity_mq.config import BrokerConfig

QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "dead")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq status``."""
    add_run_or_config(parser)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to listen (default: 3)")


def status(arguments: argparse.Namespace) -> int:
    """Listen for a while and print a table; 1 when no agent sent a heartbeat."""
    from rich.console import Console

    from trinity_mq.cli.run.display import picture

    run, broker = target(arguments)
    view, now = asyncio.run(_look(run, broker, arguments.seconds))
    Console().print(picture(view, now))
    if not view.agents(now):
        print(f"no agent of run {run!r} sent a heartbeat within {arguments.seconds:g} s", file=sys.stderr)
        return 1
    return 0


async def _look(run: str, broker: BrokerConfig, seconds: float) -> tuple[RunView, float]:
    """Return what came within so many seconds, and the time of its end."""
    async with connected(run, broker, "status") as (bus, topology):
        view = RunView(run, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await follow(bus, topology, view, "status")
        view.set_depths(await depths(bus, topology, QUEUES))
        return view, asyncio.get_running_loop().time()
