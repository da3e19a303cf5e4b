"""``trinity-mq why``: says in one sentence what a run waits for (an agent, the broker), with evidence and a remedy."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.observability.diagnosis import RunFinding
from trinity_mq.observability.listening import LISTEN_SECONDS, observe
from trinity_mq.targets.connection import find_target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import select_newest_run

MOVES, NOBODY, WAITS = 0, 1, 3
EPILOG = (
    "exit codes: 0 it moves, waits for tasks to be submitted, or is over; 1 no agent sends heartbeats; 3 it waits for, "
    "or is stuck at, the named culprit; 2 wrong usage, explained by the line on stderr"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq why``."""
    parser.epilog = EPILOG
    add_target(parser, "(default: the newest run)", optional=True)
    add_broker(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=LISTEN_SECONDS,
        help="how long to listen at most; it ends as soon as it is sure (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print the finding as JSON")


def why(arguments: argparse.Namespace) -> int:
    """Print why nothing progresses, or that the run progresses, has ended or is stopped. :data:`EPILOG` documents the
    exit codes.
    """
    select_newest_run(arguments)
    target = find_target(arguments, folder_suffices=True)
    finding = _finding_of_folder(target.folder, target.broker.url is None) or asyncio.run(
        observe(target, arguments.seconds)
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(finding), indent=2))
    else:
        print(finding.sentence)
        for line in finding.evidence:
            print(f"  {line}")
        if finding.lever:
            print(f"what to do: {finding.lever}")
    return exit_code(finding)


def exit_code(finding: RunFinding) -> int:
    """Return the exit code for a finding."""
    if finding.state == "silent":
        return NOBODY
    return WAITS if finding.state in {"waiting", "stuck"} and finding.culprit is not None else MOVES


def _finding_of_folder(folder: RunFolder | None, no_broker: bool) -> RunFinding | None:
    """Return the finding for a stopped run from its folder, or None if the broker must be asked."""
    if folder is None or folder.holder() is not None:
        return None
    if folder.finished:
        return RunFinding("over", "this run has finished; `trinity-mq status` shows its report")
    if no_broker:
        lever = f"`trinity-mq run {folder.path}` resumes it"
        return RunFinding("silent", "this run is stopped, and has not finished", lever=lever)
    return None
