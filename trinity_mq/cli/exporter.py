"""``trinity-mq exporter``: serves the metrics of one run to Prometheus."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from trinity_mq.cli.arguments import add_address, add_broker, add_target

if TYPE_CHECKING:
    from trinity_mq.targets.connection import Target

PORT = 9464


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq exporter``."""
    add_target(parser)
    add_broker(parser)
    add_address(parser, PORT)


def exporter(arguments: argparse.Namespace) -> int:
    """Serve ``/metrics`` until interrupted."""
    from trinity_mq.targets.target import find_configuration
    from trinity_mq.telemetry import setup_logging

    setup_logging("exporter", "exporter", None, "warning")
    config = find_configuration(arguments.target, arguments.overrides)
    run = arguments.target if config is None else config.name
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(arguments, run, None if config is None else config.runner.concurrency))
    return 0


async def _serve(arguments: argparse.Namespace, run: str, slots: int | None) -> None:
    from aiohttp import web

    from trinity_mq.config.hosts import is_loopback
    from trinity_mq.observability.prometheus.families import RunCollector
    from trinity_mq.observability.prometheus.handler import metrics_handler
    from trinity_mq.observability.run_state import RunState
    from trinity_mq.observability.sources import BrokerSource
    from trinity_mq.runtime.http import new_application, same_site_middleware, serve_app
    from trinity_mq.targets.connection import find_target

    state = RunState(run)

    def target() -> Target | None:
        run_target = find_target(arguments)
        return None if run_target.broker.url is None else run_target

    find_target(arguments)  # fail at once if the run is not known
    app = new_application([same_site_middleware] if is_loopback(arguments.host) else [])
    app.add_routes([web.get("/metrics", metrics_handler(RunCollector(state, time.time, slots)))])
    async with serve_app(app, arguments.host, arguments.port) as url:
        print(f"{run}: {url}/metrics", flush=True)
        await BrokerSource(target, state, {"metrics"}).run()
