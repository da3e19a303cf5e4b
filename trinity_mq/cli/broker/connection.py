"""The run of a command, and the connection to its broker."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_FILE_VARIABLE, URL_VARIABLE, Addresses, broker_url
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.config import BrokerConfig, Config, load_config

COMMAND_CONNECT_TIMEOUT = 10.0
"""Seconds: a person waits for a command, no daemon."""


def known_broker(config: Config, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the broker's URL: of the configuration, else of the environment, else of the run that runs here, else
    None. Several have commas between.

    Raises:
        AddressError: It is in a file that cannot be read.
    """
    given = Addresses.of(config.broker, environ)
    return RunFolder(config).known_broker() if given is None else given.text()


@dataclass(frozen=True)
class Target:
    """A run and its broker."""

    run: str
    broker: BrokerConfig
    """Without a URL where it is a private one that does not run now."""
    config: Config | None = None


def target(arguments: argparse.Namespace) -> tuple[str, BrokerConfig]:
    """Return the run's name and its broker from ``CONFIG`` or ``--run`` and ``--broker``.

    Raises:
        CommandError: Neither names a run, or no broker is known.
        ConfigError: The configuration cannot be used.
    """
    if (arguments.config is None) == (arguments.run is None):
        raise CommandError("give either the run's CONFIG or --run NAME, not both and not neither")
    config = None if arguments.config is None else load_config(arguments.config)
    found = find_target(config or arguments.run, arguments.broker)
    return found.run, found.broker


def find_target(
    run: Config | str, url: str | None, blob_store: str | None = None, *, startable: bool = False
) -> Target:
    """Return a run and its broker.

    Args:
        run: Its configuration, else its name.
        url: Of the broker; None: the run's, else the environment's.
        blob_store: Its URL; None: the configuration's.
        startable: The run's private broker need not run.

    Raises:
        CommandError: No broker is known.
    """
    config = None if isinstance(run, str) else run
    name, broker = (run, BrokerConfig()) if isinstance(run, str) else (run.name, run.broker)
    url = url or (broker_url(broker) if config is None else known_broker(config))
    if url is None and not (startable and config is not None and RunFolder(config).broker.is_dir()):
        raise CommandError(
            f"no broker is known for run {name!r}: does it run on this machine? Else give --broker URL, or set "
            f"{URL_VARIABLE} or {URL_FILE_VARIABLE}"
        )
    if blob_store is not None:
        broker = BrokerConfig(**{**broker.model_dump(), "blob_store": blob_store})
    timeout = min(broker.connect_timeout, COMMAND_CONNECT_TIMEOUT)
    return Target(name, broker.model_copy(update={"url": url, "url_file": None, "connect_timeout": timeout}), config)


@asynccontextmanager
async def connected(run: str, broker: BrokerConfig, who: str) -> AsyncIterator[tuple[Bus, Topology]]:
    """Open a bus to the run's broker.

    Raises:
        CommandError: The run's name does not fit.
        BusRefused, BusUnavailable: The broker does not let us in, or is not there.
    """
    try:
        topology = Topology(run, broker.ready_max_bytes, broker.results_max_bytes)
    except ValueError as error:
        raise CommandError(str(error)) from error
    bus = create_bus(broker, topology, who)
    await bus.connect()
    try:
        yield bus, topology
    finally:
        await bus.close()
