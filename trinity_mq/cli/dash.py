"""``trinity-mq dash``: serves the page of one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.cli.arguments import add_address, add_broker, add_target
from trinity_mq.errors import CommandError

if TYPE_CHECKING:
    from trinity_mq.config import Config
    from trinity_mq.observability.curves import Curves
    from trinity_mq.observability.sources import Part
    from trinity_mq.targets.connection import Target

PORT = 8720


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq dash``."""
    add_target(parser, "(default: the newest run)", optional=True)
    add_broker(parser)
    add_address(parser, PORT)
    parser.add_argument(
        "--operate",
        action="store_true",
        help="enable actions on the page: replay dead letters, restart agents, give verdicts",
    )
    parser.add_argument(
        "--beside", metavar="RUN", action="append", default=[], help="draw the curves of this run too; may be repeated"
    )


def dash(arguments: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from trinity_mq.page.app import curves_of
    from trinity_mq.targets.target import find_configuration, select_newest_run
    from trinity_mq.telemetry import setup_logging

    setup_logging("dash", "dash", None, "warning")
    select_newest_run(arguments)
    config = find_configuration(arguments.target, arguments.overrides)
    _find_broker(arguments, config)
    others = {name: curves_of(name) for name in arguments.beside}
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments, config, others))
    return 0


def _find_broker(arguments: argparse.Namespace, config: Config | None) -> Target | None:
    """Return the run and its broker; None if no running broker is known, so that only the run's folder provides data.

    Raises:
        CommandError: Neither a broker nor a run folder exists.
    """
    from trinity_mq.targets.connection import find_target

    try:
        target = find_target(arguments)
    except CommandError:
        if config is None or not config.path.is_dir():
            raise
        return None
    return None if target.broker.url is None else target


def _stopped(arguments: argparse.Namespace, config: Config | None) -> Target | None:
    """Return the run if it has a private broker that does not run now, else None."""
    from trinity_mq.targets.connection import find_target
    from trinity_mq.targets.run_folder import RunFolder

    if config is None or not RunFolder(config).broker.is_dir():
        return None
    target = find_target(arguments)
    return target if target.broker.url is None else None


async def _serve(arguments: argparse.Namespace, config: Config | None, others: dict[str, Curves]) -> None:
    from trinity_mq.config.threads import available_cores
    from trinity_mq.observability.diagnosis import free_resources
    from trinity_mq.observability.history import RunHistory
    from trinity_mq.observability.run_state import RunState
    from trinity_mq.observability.sources import BrokerSource, FolderSource
    from trinity_mq.page.access import PageAccess
    from trinity_mq.page.actions import BrokerActions
    from trinity_mq.page.app import DashApp, LazyTexts, runs, workflows
    from trinity_mq.page.run_page import RunPage
    from trinity_mq.runtime.http import serve_app
    from trinity_mq.telemetry.evaluations.log import read_evaluations

    folder = config.path if config is not None and config.path.is_dir() else None
    run = arguments.target if config is None else config.name
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    state = RunState(run, config=config, room=free_resources(config, available_cores(), gpus))
    history = RunHistory({} if config is None else workflows(config))
    access = PageAccess(arguments.host, operate=arguments.operate)
    takes: tuple[Part, ...] = ("reviews", "metrics", "samples") if folder is None else ("reviews",)
    broker = BrokerSource(lambda: _find_broker(arguments, config), state, takes, history)
    texts = LazyTexts(config)
    app = DashApp(
        RunPage(state, history),
        BrokerActions(broker, lambda: _stopped(arguments, config)),
        access,
        texts.known,
        runs=lambda: runs(folder),
        evaluations=lambda: [] if folder is None else read_evaluations(folder),
        others=others,
    )
    async with serve_app(app.application(), arguments.host, arguments.port) as url, asyncio.TaskGroup() as group:
        if folder is not None:
            group.create_task(FolderSource(folder, state, history).run())
        group.create_task(broker.run())
        group.create_task(app.tick())
        print(f"{run}: {url}/{f'?key={access.key}' if access.needs_key else ''}", flush=True)
        print("Ctrl-C stops it", file=sys.stderr)
