"""Finds the run that a command names, and connects to its broker."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_FILE_VARIABLE, URL_VARIABLE, Addresses, broker_url
from trinity_mq.bus.base import NOT_CONNECTED
from trinity_mq.config import BrokerConfig, Config
from trinity_mq.errors import CommandError
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.expected_errors import single_error
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import default_broker, find_configuration, run_list_suffix
from trinity_mq.transport.blobs import BlobStore, open_store

TROUBLE_LOOK, TROUBLE_INTERVAL = 0.5, 10.0
"""Seconds between two checks for connection problems, and between two reports about them."""
COMMAND_CONNECT_TIMEOUT = 10.0
"""Maximum seconds for a command to connect; shorter than for daemons, because a person waits for the command."""


def find_broker_url(config: Config) -> str | None:
    """Return the broker's URL from the configuration, else from the environment, else from the run's folder if the run
    is active on this machine, else None. Several URLs are separated by commas. A URL file left by a killed run is
    ignored.

    Raises:
        AddressError: The file with the URL cannot be read.
    """
    addresses = Addresses.of(config.broker, os.environ)
    return RunFolder(config).live_broker_url() if addresses is None else addresses.text()


@dataclass(frozen=True)
class Target:
    """A run and its broker."""

    run: str
    broker: BrokerConfig
    """Settings of the broker, with its address. ``url`` is None for a private broker that does not run now."""
    config: Config | None = None
    """Configuration of the run; None: only the run's name is known."""

    @property
    def folder(self) -> RunFolder | None:
        """The run's folder; None if it does not exist on this machine, or only the run's name is known."""
        return RunFolder(self.config) if self.config is not None and self.config.path.is_dir() else None


def find_target(
    arguments: argparse.Namespace, blob_store: str | None = None, *, folder_suffices: bool = False
) -> Target:
    """Return the run that TARGET and its settings name, and its broker: ``--broker`` if set, else the run's broker.

    Args:
        arguments: Arguments of the command.
        blob_store: Replaces the blob store of the configuration. None: not replaced.
        folder_suffices: If the run does not run now, the command needs only its folder, not its broker.

    Raises:
        CommandError: No broker is known, or TARGET does not name a run.
        ConfigError: The configuration is not usable.
    """
    config = find_configuration(arguments.target, arguments.overrides)
    name = arguments.target if config is None else config.name
    broker = default_broker(name, arguments.overrides) if config is None else config.broker
    url = arguments.broker or (broker_url(broker) if config is None else find_broker_url(config))
    folder = None if config is None else RunFolder(config)
    has_folder = folder is not None and (
        folder.broker.is_dir() or (folder_suffices and folder.path.is_dir() and folder.holder() is None)
    )
    if url is None and not has_folder:
        raise CommandError(
            f"no broker is known for run {name!r}: does it run on this machine? Else give --broker URL, or set "
            f"{URL_VARIABLE} or {URL_FILE_VARIABLE}{run_list_suffix()}"
        )
    if blob_store is not None:
        broker = BrokerConfig(**{**broker.model_dump(), "blob_store": blob_store})
    timeout = min(broker.connect_timeout, COMMAND_CONNECT_TIMEOUT)
    return Target(name, broker.model_copy(update={"url": url, "url_file": None, "connect_timeout": timeout}), config)


def saved_run_id(run_folder: Path) -> str | None:
    """Return the run id that the explorer has saved in its run folder; None if it saved none, or it cannot be read."""
    from trinity_agents.explorer.state import StateFile

    with contextlib.suppress(FatalError):
        return StateFile.of(run_folder).load().run_id or None
    return None


@asynccontextmanager
async def open_bus(target: Target, who: str) -> AsyncIterator[tuple[Bus, Topology]]:
    """Open a bus to the run's broker. The private broker of a run that does not run now is started, and stopped at the
    end. Of several errors, such as one of the block and one of the private broker, :func:`single_error` is raised.

    Raises:
        CommandError: The run's folder is in use, or its name is not valid.
        BusRefused, BusUnavailable: The broker refuses the connection, or is not reachable.
        NodeError: The private broker cannot be started.
    """
    if target.broker.url is not None:
        async with connect_bus(target.run, target.broker, who) as connection:
            yield connection
        return
    assert target.config is not None
    folder = RunFolder(target.config)
    with folder.locked():
        _print_note(f"starting the private broker of run {target.run!r}, which is stopped")
        try:
            async with private_broker(folder.broker, target.config.supervisor, _print_note) as url:
                async with connect_bus(target.run, target.broker.model_copy(update={"url": url}), who) as connection:
                    yield connection
        except ExceptionGroup as errors:
            raise single_error(errors) from None


@asynccontextmanager
async def open_streams(target: Target, who: str) -> AsyncIterator[tuple[Bus, Topology, BlobStore | None]]:
    """Open a bus as :func:`open_bus` does, and the store of large bodies (None: no store is configured), to read the
    streams of the run. If the run's folder is on this machine, messages of earlier runs of the same name are
    recognised. Errors as for :func:`open_bus`.
    """
    async with open_bus(target, who) as (bus, topology):
        if target.folder is not None:
            bus.run_id = saved_run_id(target.folder.path)
        yield bus, topology, open_store(target.broker, target.run)


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@asynccontextmanager
async def connect_bus(
    run: str, broker: BrokerConfig, who: str, waiting: Callable[[str], None] | None = None
) -> AsyncIterator[tuple[Bus, Topology]]:
    """Open a bus to the run's broker; ``waiting`` is called with a line of text during waits for the broker.

    Raises:
        CommandError: The run's name is not valid.
        BusRefused, BusUnavailable: The broker refuses the connection, or is not reachable.
    """
    try:
        topology = Topology.on(run, broker)
    except ValueError as error:
        raise CommandError(str(error)) from error
    bus = create_bus(broker, topology, who)
    reporting = asyncio.create_task(_report_trouble(bus, broker.connect_timeout, waiting or (lambda _line: None)))
    try:
        await bus.connect()
    finally:
        reporting.cancel()
    try:
        yield bus, topology
    finally:
        await bus.close()


async def _report_trouble(bus: Bus, seconds: float, waiting: Callable[[str], None]) -> None:
    """Call ``waiting`` at the first connection problem, and then every ten seconds while there is a problem, until
    cancelled. ``seconds`` is the time limit of the connection, which the text names.
    """
    loop = asyncio.get_running_loop()
    began, last_report = loop.time(), -TROUBLE_INTERVAL
    while True:
        await asyncio.sleep(TROUBLE_LOOK)
        waited = loop.time() - began
        if bus.trouble not in {None, NOT_CONNECTED} and waited - last_report >= TROUBLE_INTERVAL:
            last_report = waited
            waiting(f"waits for the broker, {waited:.0f} of {seconds:g} s: {bus.trouble}")
