"""``trinity-mq why``: names the agent that a run waits for in one sentence, with evidence and a remedy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import Target, connected, find_target
from trinity_mq.cli.broker.probe import broker_trouble
from trinity_mq.cli.run.follow import depths, listen
from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.cli.target import name_newest
from trinity_mq.diagnosis import Finding, Watch, diagnose, expected_agents, limits

QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "dead")
MOVES, NOBODY, WAITS = 0, 1, 3
EPILOG = (
    "exit codes: 0 it moves, waits for tasks to be submitted, or is over; 1 no agent sends heartbeats; 3 it waits for, "
    "or is stuck at, the named culprit; 2 the command cannot be used so, and the line on stderr says why"
)
LISTEN_SECONDS = 12.0
"""Default of ``--seconds``. It exceeds the time after which work counts as overdue."""
LEAST_SECONDS = 5.5
"""Minimum seconds of listening before any culprit except the broker is named, because progress may be imminent."""
LOOK_SECONDS = 0.5
"""Interval in seconds between checks of the collected messages."""
SURE_MOVES = 2
"""Number of progress changes after which a run without a culprit counts as moving."""


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
    """Print why nothing progresses, or that the run progresses. Exit codes are documented in :data:`EPILOG`."""
    name_newest(arguments)
    target = find_target(arguments, folder_suffices=True)
    finding = _finding_of_folder(target.folder, target.broker.url is None) or asyncio.run(
        _observe(target, arguments.seconds)
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


def exit_code(finding: Finding) -> int:
    """Return the exit code for a finding."""
    if finding.state == "silent":
        return NOBODY
    return WAITS if finding.state in {"waiting", "stuck"} and finding.culprit is not None else MOVES


def _finding_of_folder(folder: RunFolder | None, no_broker: bool) -> Finding | None:
    """Return the finding for a stopped run from its folder, or None if the broker must be asked."""
    if folder is None or folder.holder() is not None:
        return None
    if folder.finished:
        return Finding("over", "this run has finished; `trinity-mq status` shows its report")
    if no_broker:
        lever = f"`trinity-mq run {folder.path}` goes on with it"
        return Finding("silent", "this run does not run now, and has not finished", lever=lever)
    return None


async def _observe(target: Target, seconds: float) -> Finding:
    """Listen until the finding is certain, for at most ``seconds``."""
    try:
        async with connected(target.run, target.broker, "why") as (bus, topology):
            return await _listen(target, bus, topology, seconds)
    except (BusUnavailable, TimeoutError) as error:
        watch = Watch(0.0)
        return diagnose(watch.observation(0.0, broker=str(error) or "it does not answer"))


async def _listen(target: Target, bus: Bus, topology: Topology, seconds: float) -> Finding:
    loop = asyncio.get_running_loop()
    watch = Watch(loop.time())
    trouble = ""

    async def probe() -> None:
        nonlocal trouble
        trouble = await broker_trouble(bus, topology)

    async def look() -> Finding:
        queue_depths = await depths(bus, topology, QUEUES) if not trouble else {}
        observation = watch.observation(
            loop.time(),
            depths=queue_depths,
            broker=trouble,
            expected=expected_agents(target.config),
            limits=limits(target.config),
        )
        return diagnose(observation)

    queue = topology.listener("why", uuid.uuid4().hex[:12], "telemetry", "#")
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        background = [
            group.create_task(listen(bus, queue, _receiver(watch, loop.time))),
            group.create_task(probe()),
        ]
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await asyncio.wait(background, return_when=asyncio.FIRST_EXCEPTION)
                finding = await look()
                passed = loop.time() - began
                if passed >= seconds or _is_sure(finding, watch, passed):
                    return finding
        finally:
            for task in background:
                task.cancel()


def _receiver(watch: Watch, clock: Callable[[], float]) -> Callable[[object], None]:
    return lambda message: watch.receive(message, clock())


def _is_sure(finding: Finding, watch: Watch, passed: float) -> bool:
    """Return whether further listening would not change the finding."""
    if finding.culprit == "broker" or finding.state == "over":
        return True
    if finding.state in {"stuck", "waiting"} and finding.culprit is not None:
        return passed >= LEAST_SECONDS
    # a suspect is only evidence while the run still progresses, so keep listening
    suspect = any(line.startswith("but ") for line in finding.evidence)
    return finding.state == "moving" and watch.moves >= SURE_MOVES and not suspect and passed >= LOOK_SECONDS
