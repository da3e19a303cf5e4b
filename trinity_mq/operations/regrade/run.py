"""Regrades the experiences of a stream or of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.targets.connection import Target, open_streams

if TYPE_CHECKING:
    from trinity_mq.experience import ExperienceBatch
    from trinity_mq.operations.regrade.grading import Grader
    from trinity_mq.operations.regrade.regrading import BatchRegrader


def open_grader(config: Config, arguments: argparse.Namespace) -> Grader:
    """Return the grader that calls the reward function.

    Raises:
        CommandError: The function is not known or does not accept the arguments, or the arguments are not a JSON
            object.
    """
    from trinity_mq.operations.regrade.grading import Grader, TaskRecords
    from trinity_mq.rewards import RewardError, UnknownNameError, create_reward
    from trinity_mq.runtime.plugins import add_plugins

    try:
        reward_args = json.loads(arguments.reward_args)
    except ValueError as error:
        raise CommandError(f"--reward-args is {arguments.reward_args!r:.200}, which is not JSON: {error}") from error
    if not isinstance(reward_args, dict):
        raise CommandError(f"--reward-args is {arguments.reward_args!r:.200}, wanted an object such as '{{\"a\": 1}}'")
    add_plugins(config.plugin_dirs)
    try:
        function = create_reward(arguments.reward, reward_args)
    except (UnknownNameError, RewardError) as error:
        raise CommandError(f"--reward: {error}") from error
    return Grader(function, TaskRecords(config), arguments.timeout)


async def regrade_stream(target: Target, batch: str | None, regrading: BatchRegrader) -> None:
    """Regrade the processed batches on the ``ready`` stream of a run, until the limit of ``regrading``. ``batch`` None
    selects all batches.

    Raises:
        CommandError: The broker is not available, or the run has not left a stream on it.
    """
    from trinity_mq.bus import BusUnavailable
    from trinity_mq.experience import ExperienceBatch
    from trinity_mq.observability.experiences.printer import note
    from trinity_mq.observability.experiences.stream import ExperienceFilter, ReadyReader

    loop = asyncio.get_running_loop()

    def take(chunks: Sequence[ExperienceBatch]) -> bool:
        """Regrade a batch. The reader calls this in a thread."""
        whole = ExperienceBatch.concat(chunks) if chunks else ExperienceBatch.of([])
        return asyncio.run_coroutine_threadsafe(regrading.take(whole), loop).result() if len(whole) else False

    try:
        async with open_streams(target, "regrade") as (bus, topology, store):
            reader = ReadyReader(bus, topology, ExperienceFilter(batch=batch), store, take, note=note)
            await reader.read()
    except BusUnavailable as error:
        raise CommandError(
            f"{error}. A run that is over is regraded on its broker, as long as that keeps the stream; without it, "
            "from files that mode explore or `trainer.guard` wrote (.tmqx), with --file"
        ) from error


async def regrade_file(config: Config, path: str, batch: str | None, regrading: BatchRegrader) -> None:
    """Regrade the experiences in the file or folder ``path``, batch by batch, until the limit of ``regrading``.
    ``batch`` None selects all batches.

    Raises:
        TasksetError: The path holds no experiences, or a file cannot be read.
    """
    from trinity_agents.trainer.sources.records import recorded
    from trinity_mq.config import ExperienceBufferConfig
    from trinity_mq.observability.experiences.stream import ExperienceFilter

    data = ExperienceBufferConfig(storage_type="file", path=path, name=Path(path).name)
    whole: ExperienceBatch = ExperienceFilter(batch=batch).of((await asyncio.to_thread(recorded, data))[0])
    indices: dict[str, list[int]] = {}
    for index, number in enumerate(whole.values("eid.batch")):
        indices.setdefault(str(number), []).append(index)
    for chosen in indices.values():
        if await regrading.take(whole.select(chosen)):
            return


def all_figures(reward: str, regrading: BatchRegrader, grader: Grader) -> dict[str, Any]:
    """Return all results as a JSON object."""
    time = grader.time
    failures: Mapping[str, int] = dict(grader.failures.most_common())
    return {
        "reward_function": reward,
        "batches": regrading.batches,
        "seen": regrading.seen,
        "not_regraded": failures,
        "seconds": {
            "calls": time.calls,
            "total": time.total,
            "mean": time.total / time.calls if time.calls else None,
            "longest": time.longest,
        },
        "remarks": [
            *regrading.remarks,
            *(f"{count} batches: {reason}" for reason, count in regrading.problems.items()),
        ],
        **regrading.comparison.figures(),
    }
