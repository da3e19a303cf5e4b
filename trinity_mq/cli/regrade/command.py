"""``trinity-mq regrade``: shows how another reward function would change the rewards of a run's experiences."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import Target, find_target, reached, saved_run_id
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.output import write_output
from trinity_mq.cli.target import configuration, known_runs
from trinity_mq.config import Config

if TYPE_CHECKING:
    from trinity_mq.cli.regrade.grading import Grader
    from trinity_mq.cli.regrade.regrading import Regrading
    from trinity_mq.experience import ExperienceBatch

FOUND_NOTHING = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq regrade``."""
    add_target(parser)
    parser.add_argument(
        "--reward",
        metavar="NAME",
        required=True,
        help="the other reward function: a name such as math_boxed, or a dotted path such as my_rewards.strict",
    )
    parser.add_argument("--reward-args", metavar="JSON", default="{}", help="its arguments (default: none)")
    parser.add_argument("--batch", metavar="ID", help="only experiences of this batch")
    parser.add_argument(
        "--limit", metavar="N", type=int, help="take no further batch after so many experiences (default: all)"
    )
    parser.add_argument("--timeout", metavar="S", type=float, default=10.0, help="seconds for one call (default: 10)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - is the standard output")
    parser.add_argument(
        "--file",
        metavar="PATH",
        help="take experiences from this .tmqx file or folder, not from the stream; TARGET says how they were made",
    )
    add_broker(parser)
    parser.add_argument("--blob-store", metavar="URL", help="where large bodies are (default: that of the YAML file)")
    parser.epilog = "exit codes: 0 done; 1 there is nothing to regrade, or nothing that can be"


def regrade(arguments: argparse.Namespace) -> int:
    """Regrade the sampled experiences of a run and print the differences. Return 0, or 1 if no experience could be
    regraded.
    """
    if arguments.limit is not None and arguments.limit < 1:
        raise CommandError(f"--limit is {arguments.limit}, wanted at least 1")
    if not arguments.timeout > 0:
        raise CommandError(f"--timeout is {arguments.timeout:g}, wanted seconds above 0")
    if Path(arguments.target).suffix == ".tmqx":
        raise CommandError(
            f"{arguments.target} is a file of experiences, and TARGET the run that made them, whose tasksets have the "
            f"answers: trinity-mq regrade RUN --reward NAME --file {arguments.target}{known_runs()}"
        )
    config = configuration(arguments)
    # output of the library and of the reward function must not mix with the figures on stdout
    with contextlib.redirect_stdout(sys.stderr):
        grader = _grader(config, arguments)
        from trinity_mq.cli.regrade.regrading import Regrading

        regrading = Regrading(config, grader, arguments.limit)
        if arguments.file is not None:
            run_to_the_end(_regrade_file(config, arguments.file, arguments.batch, regrading))
        else:
            run_to_the_end(_regrade_stream(find_target(arguments, arguments.blob_store), arguments.batch, regrading))
    figures = all_figures(arguments.reward, regrading, grader)
    if config.operator.operators:
        names = ", ".join(operator.name for operator in config.operator.operators)
        figures["remarks"].append(f"old rewards are those after the run's operators ({names}), new ones are not")
    if arguments.json == "-":
        print(json.dumps(figures, ensure_ascii=False, indent=1))
    else:
        if arguments.json is not None:
            write_output(Path(arguments.json), json.dumps(figures, ensure_ascii=False, indent=1) + "\n")
        from trinity_mq.cli.regrade.text import show

        show(figures, sys.stdout)
    return 0 if figures["experiences"] else FOUND_NOTHING


def _grader(config: Config, arguments: argparse.Namespace) -> Grader:
    """Return the grader that calls the reward function.

    Raises:
        CommandError: The function is not known or does not accept the arguments, or the arguments are not a JSON
            object.
    """
    from trinity_mq.cli.regrade.grading import Grader, Tasks
    from trinity_mq.rewards import RewardError, UnknownNameError, create_reward
    from trinity_mq.runtime.plugins import add_plugins

    try:
        reward_args = json.loads(arguments.reward_args)
    except ValueError as error:
        raise CommandError(f"--reward-args is {arguments.reward_args!r:.200}, which is no JSON: {error}") from error
    if not isinstance(reward_args, dict):
        raise CommandError(f"--reward-args is {arguments.reward_args!r:.200}, wanted an object such as '{{\"a\": 1}}'")
    add_plugins(config.plugin_dirs)
    try:
        function = create_reward(arguments.reward, reward_args)
    except (UnknownNameError, RewardError) as error:
        raise CommandError(f"--reward: {error}") from error
    return Grader(function, Tasks(config), arguments.timeout)


async def _regrade_stream(target: Target, batch: str | None, regrading: Regrading) -> None:
    from trinity_mq.bus import BusUnavailable
    from trinity_mq.cli.inspect.command import note
    from trinity_mq.cli.inspect.stream import Choice, ReadyReader
    from trinity_mq.experience import ExperienceBatch
    from trinity_mq.transport.blobs import open_store

    loop = asyncio.get_running_loop()

    def take(chunks: Sequence[ExperienceBatch]) -> bool:
        """Regrade a batch. The reader calls this in a thread."""
        whole = ExperienceBatch.concat(chunks) if chunks else ExperienceBatch.of([])
        return asyncio.run_coroutine_threadsafe(regrading.take(whole), loop).result() if len(whole) else False

    try:
        async with reached(target, "regrade") as (bus, topology):
            if target.folder is not None:
                bus.run_id = saved_run_id(target.folder.path)
            store = open_store(target.broker, target.run)
            reader = ReadyReader(bus, topology, Choice(batch=batch), store, take, note=note)
            await reader.read()
    except BusUnavailable as error:
        raise CommandError(
            f"{error}. A run that is over is regraded on its broker, as long as that keeps the stream; without it, "
            "from files that mode explore or `trainer.guard` wrote (.tmqx), with --file"
        ) from error


async def _regrade_file(config: Config, path: str, batch: str | None, regrading: Regrading) -> None:
    """Regrade recorded experiences, batch by batch.

    Raises:
        TasksetError: The path holds no experiences, or a file cannot be read.
    """
    from trinity_agents.trainer.sources.records import recorded
    from trinity_mq.cli.inspect.stream import Choice
    from trinity_mq.config import ExperienceBufferConfig

    data = ExperienceBufferConfig(storage_type="file", path=path, name=Path(path).name)
    whole: ExperienceBatch = Choice(batch=batch).of((await asyncio.to_thread(recorded, data))[0])
    indices: dict[str, list[int]] = {}
    for index, number in enumerate(whole.values("eid.batch")):
        indices.setdefault(str(number), []).append(index)
    for chosen in indices.values():
        if await regrading.take(whole.select(chosen)):
            return


def all_figures(reward: str, regrading: Regrading, grader: Grader) -> dict[str, Any]:
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
