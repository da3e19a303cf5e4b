"""The private broker of a tapped run, kept running while that run does not run itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.run_folder import RunFolder

LOOK_SECONDS = 1.0
"""Seconds between two checks whether the tapped run keeps its broker running."""


@contextlib.asynccontextmanager
async def tapped_broker(config: Config, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Keep the private broker of the run in ``source.tap`` running while that run does not run itself, so that its
    stream can be read to the end. Do nothing without ``source.tap``, or if the tapped run does not use a private
    broker.

    Args:
        config: Configuration of the training run.
        report: Called with a line of text for a person.

    Raises:
        FatalError: ``source.tap`` does not name a run.
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
    """Return the folder of a tapped run with a private broker; None if there is no such run."""
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
            with contextlib.suppress(CommandError):  # another process took the folder first
                await _serve(folder, config, report)
        await asyncio.sleep(LOOK_SECONDS)


async def _serve(folder: RunFolder, config: Config, report: Callable[[str], None]) -> None:
    """Run the broker until cancelled.

    Raises:
        CommandError: Another process works in the folder.
    """
    with folder.locked():
        report(f"starting the private broker of run {folder.name!r}, which is stopped")
        async with private_broker(folder.broker, config.supervisor, report) as url:
            folder.save_broker_url(url)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                folder.remove_broker_url()
