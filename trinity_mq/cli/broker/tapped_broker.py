"""The private broker of a run that another one trains on, while nobody else keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from trinity_mq.cli.broker.own import own_broker
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.config import Config

LOOK_SECONDS = 1.0
"""Seconds between looks at whether the other run still keeps its broker."""


@contextlib.asynccontextmanager
async def tapped_broker(config: Config, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Keep the private broker of the run that ``source.tap`` names whenever that run does not run itself, so that its
    stream can be read to the end. Does nothing for a run on another broker, or without ``source.tap``.

    Args:
        config: Of the run that trains.
        report: Called with a line for a person.

    Raises:
        FatalError: ``source.tap`` names no run.
        NodeError: The broker could not be started, or died too often.
    """
    folder = _folder(config)
    if folder is None:
        yield
        return
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(_keep(folder, config, report), name="keep the tapped broker")
        yield
        keeping.cancel()


def _folder(config: Config) -> RunFolder | None:
    """Return the folder of a tapped run with a private broker."""
    if config.mode != "train" or not config.source.tap:
        return None
    from trinity_agents.trainer.sources.tapped_run import TappedRun

    run = TappedRun.of(config)
    if run.config is None or run.url_file is None:
        return None
    return RunFolder(run.config.model_copy(update={"run_dir": str(run.url_file.parent)}))


async def _keep(folder: RunFolder, config: Config, report: Callable[[str], None]) -> None:
    while True:
        if folder.holder() is None:
            with contextlib.suppress(CommandError):  # somebody was faster
                await _serve(folder, config, report)
        await asyncio.sleep(LOOK_SECONDS)


async def _serve(folder: RunFolder, config: Config, report: Callable[[str], None]) -> None:
    """Run the broker until cancelled.

    Raises:
        CommandError: Another process works in the folder.
    """
    with folder.locked():
        report(f"starting the private broker of run {folder.name!r}, which does not run now")
        async with own_broker(folder.broker, config.supervisor, report) as url:
            folder.note_broker(url)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                folder.forget_broker()
